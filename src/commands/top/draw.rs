// SPDX-License-Identifier: GPL-2.0-only
//! Draws what the model of `cohort top` holds. 80 columns are enough; no colour is needed.

use super::model::{Model, Order, Page, Row};
use crate::commands::watch::NO_VM;
use crate::observer::view::{VcpuView, quantile_us};
use crate::text::columns::Column;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};

const KEYS: [(&str, &str); 14] = [
    ("q", "leave"),
    ("h ?", "this page"),
    (
        "up down",
        "choose a VM or vCPU (also k j, page keys, Home, End)",
    ),
    ("Enter e", "open a VM to its vCPUs, or close it"),
    ("l", "latency: histograms of the chosen VM or vCPU"),
    ("w", "who took the chosen VM's CPUs"),
    ("v Esc", "back to the VMs"),
    ("U R S N", "sort by %RUN, %RDY, SPIN/s, name"),
    ("< >", "sort by the column to the left, to the right"),
    ("r", "the other way round"),
    (
        "/",
        "only VMs with this in their names; Enter keeps it, Esc drops it",
    ),
    ("f", "choose columns, and what they mean"),
    ("space p", "pause"),
    ("[ ]", "replaying: one window back, one on"),
];

/// The name's column is at least and at most so wide.
const NAME_WIDTH: (u16, u16) = (10, 30);

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let blind = model.view.blind_spots.len() as u16;
    let [title, spots, body, status] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(blind),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Line::from(summary(model)).style(Modifier::BOLD), title);
    frame.render_widget(Text::from(model.view.blind_spots.join("\n")), spots);
    match model.page {
        Page::Vms => vms(frame, model, body),
        Page::Latency => frame.render_widget(Paragraph::new(latency(model, body.width)), body),
        Page::Takers => takers(frame, model, body),
        Page::Columns => columns(frame, model, body),
        Page::Help => frame.render_widget(Paragraph::new(help()), body),
    }
    let hidden = hidden_columns(model, body.width);
    frame.render_widget(
        Line::from(status_line(model, hidden)).style(Modifier::REVERSED),
        status,
    );
}

fn summary(model: &Model) -> String {
    let view = &model.view;
    let vcpus: u32 = view.vms.values().map(|vm| vm.all.vcpus).sum();
    let efficiency = view.efficiency();
    let efficiency = efficiency.map(|pct| format!("  efficiency {pct:.0} %"));
    format!(
        "{:.1} s  {}  {} CPUs  {} VMs  {vcpus} vCPUs ({:.1} per CPU){}",
        model.seconds(),
        // Without the machine it was built for, which scx schedulers have at the end of their names.
        view.scheduler.split("_x86_64").next().unwrap_or_default(),
        view.cpus,
        view.vms.len(),
        view.overcommitment,
        efficiency.unwrap_or_default(),
    )
}

fn status_line(model: &Model, hidden: usize) -> String {
    if model.typing {
        return format!("/{}_  (Enter keeps it, Esc drops it)", model.filter);
    }
    if !model.notice.is_empty() {
        return model.notice.clone();
    }
    let mut parts = Vec::new();
    if model.paused {
        parts.push(String::from("PAUSED"));
    }
    if !model.filter.is_empty() {
        parts.push(format!("only *{}*", model.filter));
    }
    if hidden > 0 && model.page == Page::Vms {
        parts.push(format!("{hidden} columns do not fit (f chooses)"));
    }
    parts.push(String::from(
        "h help  q leave  Enter vCPUs  l latency  w who took CPUs",
    ));
    parts.join("  ")
}

fn name_width(rows: &[Row<'_>]) -> u16 {
    let widest = rows.iter().map(|row| row.name.chars().count()).max();
    (widest.unwrap_or(0) as u16).clamp(NAME_WIDTH.0, NAME_WIDTH.1)
}

/// The columns that fit beside a name of `name` characters, and how wide each is.
fn fitting(model: &Model, name: u16, width: u16) -> Vec<(Column, u16)> {
    let mut left = width.saturating_sub(name);
    let mut fitting = Vec::new();
    for column in model.columns() {
        let wide = column.heading().len().max(5) as u16;
        // One more between columns.
        if left < wide + 1 {
            break;
        }
        left -= wide + 1;
        fitting.push((column, wide));
    }
    fitting
}

fn hidden_columns(model: &Model, width: u16) -> usize {
    let name = name_width(&model.rows());
    model.columns().count() - fitting(model, name, width).len()
}

fn vms(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let rows = model.rows();
    if rows.is_empty() {
        let text = match model.view.vms.is_empty() {
            true => NO_VM,
            false => "No VM has such a name; / Esc shows all.",
        };
        frame.render_widget(Text::from(text), area);
        return;
    }
    let name = name_width(&rows);
    let columns = fitting(model, name, area.width);
    let sorted = |order: Order| match order == model.order {
        true => Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD),
        false => Style::new().add_modifier(Modifier::BOLD),
    };
    let mut headings = vec![Cell::from("VM").style(sorted(Order::Name))];
    headings.extend(columns.iter().map(|&(column, _)| {
        let heading = Line::from(column.heading()).right_aligned();
        Cell::from(heading).style(sorted(Order::By(column)))
    }));
    let seconds = model.seconds();
    // Of a thousand VMs only those on the screen are made into text.
    let chosen = model.chosen_place().unwrap_or(0);
    let height = usize::from(area.height.saturating_sub(1)).max(1);
    let first = chosen.saturating_sub(height - 1);
    let lines = rows.iter().skip(first).take(height).map(|row| {
        let mut cells = vec![Cell::from(row.name.clone())];
        cells.extend(columns.iter().map(|&(column, _)| {
            Cell::from(Line::from(column.text(row.numbers, seconds)).right_aligned())
        }));
        TableRow::new(cells)
    });
    let widths = std::iter::once(name).chain(columns.iter().map(|&(_, wide)| wide));
    let table = Table::new(lines, widths.map(Constraint::Length))
        .header(TableRow::new(headings))
        .column_spacing(1)
        .row_highlight_style(Modifier::REVERSED);
    let mut state = TableState::new().with_selected(Some(chosen - first));
    frame.render_stateful_widget(table, area, &mut state);
}

fn latency(model: &Model, width: u16) -> String {
    let Some((name, numbers)) = chosen_numbers(model) else {
        return String::from("No VM is chosen.");
    };
    let mut text = name + "\n\n";
    text += &histogram("Waits for a CPU", &numbers.ready_us, width);
    text += &format!(
        "longest since it is observed: {} us\n\n",
        numbers.longest_ready_us
    );
    if !model.view.has("ipi_to_run") {
        return text;
    }
    text += &histogram(
        "From an IPI to a waiting vCPU until that ran",
        &numbers.ipi_to_run,
        width,
    );
    text += &format!(
        "longest since it is observed: {} us\n",
        numbers.longest_ipi_us
    );
    text
}

fn chosen_numbers(model: &Model) -> Option<(String, &VcpuView)> {
    let vm = model.chosen_vm()?;
    match model.chosen?.vcpu {
        None => Some((vm.name.clone(), &vm.all)),
        Some(number) => {
            let vcpu = vm.vcpus.get(&number)?;
            Some((format!("{}, vCPU {number}", vm.name), vcpu))
        }
    }
}

/// A line per bucket between the first and the last that hold something.
fn histogram(title: &str, buckets: &[u64], width: u16) -> String {
    let all: u64 = buckets.iter().sum();
    let quantile = |quantile| {
        quantile_us(buckets, quantile).map_or(String::from("-"), |us| format!("<{us} us"))
    };
    let mut text = format!(
        "{title}: {all} in this window, p50 {}, p99 {}\n",
        quantile(0.5),
        quantile(0.99)
    );
    let most = buckets.iter().copied().max().unwrap_or(0).max(1);
    let room = usize::from(width.saturating_sub(32)).max(10);
    let filled = |count: &u64| *count > 0;
    let first = buckets.iter().position(filled).unwrap_or(0);
    let last = buckets.iter().rposition(filled).map_or(0, |last| last + 1);
    for (bucket, &count) in buckets.iter().enumerate().take(last).skip(first) {
        let bar = (count as f64 / most as f64 * room as f64).ceil() as usize;
        text += &format!(
            "  < {:>9} us {:>9}  {}\n",
            1u64 << bucket,
            count,
            "#".repeat(bar)
        );
    }
    text
}

fn takers(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let Some(vm) = model.chosen_vm() else {
        frame.render_widget(Text::from("No VM is chosen."), area);
        return;
    };
    let seconds = model.seconds().max(1e-3);
    let right = |text: String| Cell::from(Line::from(text).right_aligned());
    let lines = vm.takers.iter().map(|taker| {
        TableRow::new([
            Cell::from(taker.name.clone()),
            right(format!("{:.0}", taker.times as f64 / seconds)),
            right(format!("{:.1}", taker.ready_us as f64 / 1000.0 / seconds)),
        ])
    });
    let widths = [
        Constraint::Length(40),
        Constraint::Length(10),
        Constraint::Length(16),
    ];
    let heading = |text: &'static str| Cell::from(Line::from(text).right_aligned());
    let header = TableRow::new([
        Cell::from(format!("WHO TOOK A CPU FROM {}", vm.name)),
        heading("TIMES/s"),
        heading("WAITED ms/s"),
    ])
    .style(Modifier::BOLD);
    frame.render_widget(Table::new(lines, widths).header(header), area);
}

fn columns(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let lines = Column::ALL.into_iter().map(|column| {
        let mark = match model.is_shown(column) {
            true => "[x]",
            false => "[ ]",
        };
        TableRow::new([mark, column.heading(), column.meaning()])
    });
    let widths = [
        Constraint::Length(3),
        Constraint::Length(9),
        Constraint::Min(20),
    ];
    let header = TableRow::new(["", "COLUMN", "space shows or hides it, f goes back"]);
    let table = Table::new(lines, widths)
        .header(header.style(Modifier::BOLD))
        .row_highlight_style(Modifier::REVERSED);
    let mut state = TableState::new().with_selected(Some(model.chosen_column));
    frame.render_stateful_widget(table, area, &mut state);
}

fn help() -> String {
    let keys = KEYS
        .map(|(key, what)| format!("  {key:<9} {what}\n"))
        .concat();
    format!("Keys\n{keys}")
}

#[cfg(test)]
mod tests {
    use super::super::model::tests::window;
    use super::*;
    use crate::observer::view::TakerView;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyCode;

    fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("it is memory");
        terminal
            .draw(|frame| draw(frame, model))
            .expect("it is memory");
        let buffer = terminal.backend().buffer().clone();
        let cells = buffer.content().chunks(usize::from(width));
        cells
            .map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>())
            .collect()
    }

    #[test]
    fn eighty_columns_show_who_runs_and_who_waits() {
        let model = Model::new(window(&[("calm", 1.0), ("waits", 50.0)]));
        let lines = screen(&model, 80, 10);
        assert!(lines[0].starts_with("1.0 s  stock  4 CPUs  2 VMs  4 vCPUs (1.0 per CPU)"));
        assert!(
            lines[1].contains("%RUN") && lines[1].contains("%RDY") && lines[1].contains("%HALT")
        );
        assert!(lines[2].starts_with("waits") && lines[2].contains("50.0"));
        assert!(lines[3].starts_with("calm"));
        assert!(lines[9].contains("columns do not fit") && lines[9].contains("h help"));
        // On a wide screen nothing is left out.
        assert!(!screen(&model, 200, 10)[9].contains("do not fit"));
    }

    #[test]
    fn any_size_can_be_drawn_and_every_page() {
        let mut model = Model::new(window(&[("calm", 1.0), ("waits", 50.0)]));
        for key in ['v', 'l', 'w', 'f', 'h'] {
            model.press(KeyCode::Char(key));
            for (width, height) in [(1, 1), (20, 3), (80, 24), (300, 100)] {
                screen(&model, width, height);
            }
        }
        screen(&Model::new(window(&[])), 80, 24);
    }

    #[test]
    fn the_chosen_row_is_on_the_screen_however_many_there_are() {
        let names: Vec<String> = (0..1000).map(|number| format!("vm{number}")).collect();
        let vms: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
        let mut model = Model::new(window(&vms));
        model.press(KeyCode::End);
        let chosen = model.chosen_vm().expect("there are many").name.clone();
        let lines = screen(&model, 80, 24);
        assert!(lines[22].starts_with(&chosen), "{lines:?}");
    }

    #[test]
    fn a_histogram_shows_what_happened_and_nothing_else() {
        let mut view = window(&[("waits", 50.0)]);
        let vm = view.vms.get_mut(&100).expect("it was made");
        vm.all.ready_us = vec![0; 24];
        (vm.all.ready_us[3], vm.all.ready_us[5]) = (8, 2);
        let mut model = Model::new(view);
        model.press(KeyCode::Char('l'));
        let lines = screen(&model, 80, 24);
        assert!(
            lines
                .iter()
                .any(|line| line.contains("10 in this window, p50 <8 us, p99 <32 us"))
        );
        let bars: Vec<&String> = lines.iter().filter(|line| line.contains("  < ")).collect();
        assert_eq!(bars.len(), 3, "{bars:?}");
        assert!(bars[0].contains("####") && !bars[1].contains('#'));
    }

    #[test]
    fn who_took_cpus_is_named() {
        let mut view = window(&[("waits", 50.0), ("takes", 0.0)]);
        let taker = |name: &str| TakerView {
            name: name.into(),
            times: 30,
            ready_us: 4000,
            ..TakerView::default()
        };
        let vm = view.vms.get_mut(&100).expect("it was made");
        vm.takers = vec![taker("takes"), taker("/system.slice")];
        let mut model = Model::new(view);
        model.press(KeyCode::Char('w'));
        let lines = screen(&model, 80, 24);
        assert!(lines[2].starts_with("takes") && lines[2].contains("4.0"));
        assert!(lines[3].starts_with("/system.slice"));
    }
}
