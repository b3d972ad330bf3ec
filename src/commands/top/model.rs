// SPDX-License-Identifier: GPL-2.0-only
//! What `cohort top` shows at the moment, and how keys change that. No terminal, no kernel: windows and keys go in, rows
//! come out.

use crate::observer::view::{HostView, VcpuView, VmView};
use crate::text::columns::Column;
use ratatui::crossterm::event::KeyCode;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// What fills the screen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Page {
    /// All VMs, a row each.
    Vms,
    /// Histograms of the chosen VM or vCPU.
    Latency,
    /// Who took the chosen VM's CPUs.
    Takers,
    /// Which columns are shown.
    Columns,
    /// The keys.
    Help,
}

/// What the loop around the model has to do about a key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// Draw again.
    Draw,
    /// Leave.
    Quit,
    /// Show the next (1) or the previous (-1) window of a recording.
    Step(isize),
}

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Order {
    /// A to Z.
    Name,
    /// By a column, the greatest first.
    By(Column),
}

/// A VM by its process, or a vCPU of it by its number.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct RowKey {
    /// Process of the VM.
    pub tgid: u32,
    /// `None`: all its vCPUs together.
    pub vcpu: Option<u32>,
}

/// One line of the table.
pub struct Row<'a> {
    /// Which VM or vCPU.
    pub key: RowKey,
    /// What stands in front.
    pub name: String,
    /// Its numbers.
    pub numbers: &'a VcpuView,
}

/// The state of the screen.
pub struct Model {
    /// The window that is shown.
    pub view: HostView,
    /// What fills the screen.
    pub page: Page,
    /// By what rows are sorted.
    pub order: Order,
    /// The other way round.
    pub reversed: bool,
    /// Only VMs whose names hold this.
    pub filter: String,
    /// The filter is being typed.
    pub typing: bool,
    /// New windows are not shown.
    pub paused: bool,
    /// Something that the user has to know, until the next key.
    pub notice: String,
    /// The chosen row.
    pub chosen: Option<RowKey>,
    /// The chosen line of the page of columns.
    pub chosen_column: usize,
    expanded: BTreeSet<u32>,
    hidden: Vec<Column>,
}

impl Model {
    /// Shows `view`, the VM that waits most first.
    pub fn new(view: HostView) -> Self {
        let mut model = Self {
            view,
            page: Page::Vms,
            order: Order::By(Column::Ready),
            reversed: false,
            filter: String::new(),
            typing: false,
            paused: false,
            notice: String::new(),
            chosen: None,
            chosen_column: 0,
            expanded: BTreeSet::new(),
            hidden: Vec::new(),
        };
        model.keep_choice(0);
        model
    }

    /// A new window is there.
    pub fn show(&mut self, view: HostView) {
        let place = self.chosen_place().unwrap_or(0);
        self.view = view;
        self.keep_choice(place);
    }

    /// The length of the window that is shown, in seconds.
    pub fn seconds(&self) -> f64 {
        self.view.window_ms as f64 / 1000.0
    }

    /// The columns that the user wants to see.
    pub fn columns(&self) -> impl Iterator<Item = Column> {
        let shown = |column: &Column| !self.hidden.contains(column);
        Column::of(&self.view).into_iter().filter(shown)
    }

    /// The lines of the table.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let matches = |vm: &&VmView| vm.name.contains(&self.filter);
        let vms = self.view.vms.iter();
        let mut vms: Vec<(u32, &VmView)> = vms
            .map(|(&tgid, vm)| (tgid, vm))
            .filter(|(_, vm)| matches(vm))
            .collect();
        vms.sort_by(|(_, a), (_, b)| {
            let by_name = || a.name.cmp(&b.name);
            let ordering = match self.order {
                Order::Name => by_name(),
                Order::By(column) => self
                    .greatest_first(column, &a.all, &b.all)
                    .then_with(by_name),
            };
            match self.reversed {
                true => ordering.reverse(),
                false => ordering,
            }
        });
        let mut rows = Vec::new();
        for (tgid, vm) in vms {
            rows.push(Row {
                key: RowKey { tgid, vcpu: None },
                name: vm.name.clone(),
                numbers: &vm.all,
            });
            if self.expanded.contains(&tgid) {
                rows.extend(vm.vcpus.iter().map(|(&number, vcpu)| Row {
                    key: RowKey {
                        tgid,
                        vcpu: Some(number),
                    },
                    name: format!("  vCPU {number}"),
                    numbers: vcpu,
                }));
            }
        }
        rows
    }

    /// Where the chosen row stands.
    pub fn chosen_place(&self) -> Option<usize> {
        let chosen = self.chosen?;
        self.rows().iter().position(|row| row.key == chosen)
    }

    /// The VM of the chosen row.
    pub fn chosen_vm(&self) -> Option<&VmView> {
        self.view.vms.get(&self.chosen?.tgid)
    }

    /// Whether a column is shown.
    pub fn is_shown(&self, column: Column) -> bool {
        !self.hidden.contains(&column)
    }

    /// What a key does.
    pub fn press(&mut self, key: KeyCode) -> Action {
        self.notice.clear();
        if self.typing {
            self.type_filter(key);
            return Action::Draw;
        }
        match key {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char(']') => return Action::Step(1),
            KeyCode::Char('[') => return Action::Step(-1),
            KeyCode::Char(' ' | 'p') if self.page != Page::Columns => self.paused = !self.paused,
            KeyCode::Char('h' | '?') => self.toggle(Page::Help),
            KeyCode::Char('l') => self.toggle(Page::Latency),
            KeyCode::Char('w') => self.toggle(Page::Takers),
            KeyCode::Char('f') => self.toggle(Page::Columns),
            KeyCode::Char('v') | KeyCode::Esc => self.page = Page::Vms,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('U') => self.sort(Order::By(Column::Run)),
            KeyCode::Char('R') => self.sort(Order::By(Column::Ready)),
            KeyCode::Char('S') => self.sort(Order::By(Column::Spins)),
            KeyCode::Char('N') => self.sort(Order::Name),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('>') => self.sort_by_neighbour(1),
            KeyCode::Char('<') => self.sort_by_neighbour(-1),
            KeyCode::Enter | KeyCode::Char(' ') if self.page == Page::Columns => {
                self.toggle_column();
            }
            KeyCode::Enter | KeyCode::Char('e') => self.toggle_vcpus(),
            KeyCode::Up | KeyCode::Char('k') => self.choose(-1),
            KeyCode::Down | KeyCode::Char('j') => self.choose(1),
            KeyCode::PageUp => self.choose(-20),
            KeyCode::PageDown => self.choose(20),
            KeyCode::Home => self.choose(isize::MIN / 2),
            KeyCode::End => self.choose(isize::MAX / 2),
            _ => self.notice = String::from("h shows the keys"),
        }
        Action::Draw
    }

    fn greatest_first(&self, column: Column, a: &VcpuView, b: &VcpuView) -> Ordering {
        // What has no value comes last.
        let value = |vcpu| {
            column
                .value(vcpu, self.seconds())
                .unwrap_or(f64::NEG_INFINITY)
        };
        value(b).total_cmp(&value(a))
    }

    fn toggle(&mut self, page: Page) {
        self.page = match self.page == page {
            true => Page::Vms,
            false => page,
        };
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(character) => self.filter.push(character),
            _ => {}
        }
        self.keep_choice(0);
    }

    fn sort(&mut self, order: Order) {
        self.order = order;
        self.reversed = false;
    }

    fn sort_by_neighbour(&mut self, step: isize) {
        let columns: Vec<Column> = self.columns().collect();
        let place = |column| columns.iter().position(|&other| other == column);
        // The name stands before all columns.
        let now = match self.order {
            Order::Name => 0,
            Order::By(column) => place(column).map_or(0, |place| place as isize + 1),
        };
        let next = (now + step).clamp(0, columns.len() as isize);
        self.sort(match next {
            0 => Order::Name,
            next => Order::By(columns[next as usize - 1]),
        });
    }

    fn toggle_column(&mut self) {
        let column = Column::ALL[self.chosen_column];
        match self.hidden.iter().position(|&hidden| hidden == column) {
            Some(place) => {
                self.hidden.remove(place);
            }
            None => self.hidden.push(column),
        }
    }

    fn toggle_vcpus(&mut self) {
        let Some(RowKey { tgid, .. }) = self.chosen else {
            return;
        };
        if !self.expanded.remove(&tgid) {
            self.expanded.insert(tgid);
        }
        self.chosen = Some(RowKey { tgid, vcpu: None });
    }

    fn choose(&mut self, step: isize) {
        let moved = |place: usize, length: usize| {
            let last = length.saturating_sub(1) as isize;
            (place as isize).saturating_add(step).clamp(0, last) as usize
        };
        if self.page == Page::Columns {
            self.chosen_column = moved(self.chosen_column, Column::ALL.len());
            return;
        }
        let rows = self.rows();
        let place = moved(self.chosen_place().unwrap_or(0), rows.len());
        self.chosen = rows.get(place).map(|row| row.key);
    }

    /// The chosen row, if it is gone, is the one that has come to its place.
    fn keep_choice(&mut self, place: usize) {
        if self.chosen_place().is_some() {
            return;
        }
        let rows = self.rows();
        let row = rows.get(place.min(rows.len().saturating_sub(1)));
        self.chosen = row.map(|row| row.key);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A window of one second with VMs of two vCPUs: name and % ready.
    pub fn window(vms: &[(&str, f64)]) -> HostView {
        let vm = |(number, &(name, ready_pct)): (usize, &(&str, f64))| {
            let numbers = |vcpus| VcpuView {
                vcpus,
                ready_pct,
                run_pct: 100.0 - ready_pct,
                ..VcpuView::default()
            };
            let view = VmView {
                name: name.to_owned(),
                all: numbers(2),
                vcpus: BTreeMap::from([(0, numbers(1)), (1, numbers(1))]),
                ..VmView::default()
            };
            (100 + number as u32, view)
        };
        HostView {
            window_ms: 1000,
            cpus: 4,
            scheduler: "stock".into(),
            overcommitment: 2.0 * vms.len() as f64 / 4.0,
            unseen: vec!["efficiency_pct".into()],
            vms: vms.iter().enumerate().map(vm).collect(),
            ..HostView::default()
        }
    }

    fn names(model: &Model) -> Vec<String> {
        model.rows().into_iter().map(|row| row.name).collect()
    }

    fn press(model: &mut Model, keys: &str) {
        for key in keys.chars() {
            model.press(KeyCode::Char(key));
        }
    }

    fn three() -> Model {
        Model::new(window(&[("calm", 1.0), ("waits", 50.0), ("busy", 20.0)]))
    }

    #[test]
    fn who_waits_most_comes_first_and_keys_change_the_order() {
        let mut model = three();
        assert_eq!(names(&model), ["waits", "busy", "calm"]);
        press(&mut model, "U");
        assert_eq!(names(&model), ["calm", "busy", "waits"]);
        press(&mut model, "r");
        assert_eq!(names(&model), ["waits", "busy", "calm"]);
        press(&mut model, "N");
        assert_eq!(names(&model), ["busy", "calm", "waits"]);
        press(&mut model, "<<>");
        assert_eq!(model.order, Order::By(Column::Vcpus));
    }

    #[test]
    fn the_choice_stays_with_its_vm_while_the_order_changes() {
        let mut model = three();
        model.press(KeyCode::Down);
        assert_eq!(model.chosen_vm().map(|vm| vm.name.as_str()), Some("busy"));
        model.show(window(&[("calm", 90.0), ("waits", 50.0), ("busy", 20.0)]));
        assert_eq!(model.chosen_vm().map(|vm| vm.name.as_str()), Some("busy"));
        // It is gone: whoever has come to its place.
        model.show(window(&[("calm", 90.0), ("waits", 50.0)]));
        assert_eq!(model.chosen_vm().map(|vm| vm.name.as_str()), Some("waits"));
        model.show(window(&[]));
        assert!(model.chosen_vm().is_none());
        model.press(KeyCode::Down);
        model.press(KeyCode::Enter);
    }

    #[test]
    fn a_vm_opens_to_its_vcpus_and_closes() {
        let mut model = three();
        model.press(KeyCode::Enter);
        assert_eq!(
            names(&model),
            ["waits", "  vCPU 0", "  vCPU 1", "busy", "calm"]
        );
        model.press(KeyCode::Down);
        assert_eq!(model.chosen.and_then(|key| key.vcpu), Some(0));
        model.press(KeyCode::Enter);
        assert_eq!(names(&model), ["waits", "busy", "calm"]);
    }

    #[test]
    fn a_filter_is_typed_kept_and_dropped() {
        let mut model = three();
        press(&mut model, "/qa");
        assert!(names(&model).is_empty());
        model.press(KeyCode::Backspace);
        model.press(KeyCode::Backspace);
        press(&mut model, "al");
        assert_eq!(names(&model), ["calm"]);
        model.press(KeyCode::Enter);
        // Keys are keys again.
        assert_eq!(model.press(KeyCode::Char('q')), Action::Quit);
        press(&mut model, "/");
        model.press(KeyCode::Esc);
        assert_eq!(names(&model).len(), 3);
    }

    #[test]
    fn a_column_that_is_not_wanted_goes_and_comes_back() {
        let mut model = three();
        press(&mut model, "f ");
        assert!(!model.columns().any(|column| column == Column::ALL[0]));
        press(&mut model, " ");
        assert_eq!(model.columns().count(), Column::ALL.len());
        model.press(KeyCode::End);
        assert_eq!(model.chosen_column, Column::ALL.len() - 1);
        // Where columns are chosen the space bar does not pause.
        assert!(!model.paused);
        press(&mut model, "f ");
        assert!(model.paused);
    }

    #[test]
    fn an_unknown_key_says_where_help_is() {
        let mut model = three();
        press(&mut model, "z");
        assert!(model.notice.contains('h'));
        press(&mut model, "h");
        assert!(model.notice.is_empty() && model.page == Page::Help);
    }
}
