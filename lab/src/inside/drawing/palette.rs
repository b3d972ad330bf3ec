// SPDX-License-Identifier: GPL-2.0-only
//! What stands for whom, in the terminal and in a picture: letters and colours, an axis and a legend. Not for how they
//! are put together.
use super::timeline::{Timeline, Who};

/// A ground with ink that can be read on it, as SVG has it and by number of the 256 colours of terminals.
pub struct Colour {
    pub ground: &'static str,
    pub ink: &'static str,
    pub terminal_ground: u8,
    pub terminal_ink: u8,
}

const fn colour(ground: &'static str, terminal_ground: u8, dark: bool) -> Colour {
    Colour {
        ground,
        ink: if dark { "#ffffff" } else { "#000000" },
        terminal_ground,
        terminal_ink: if dark { 231 } else { 16 },
    }
}

/// Told apart by those who see no red or green, too (Okabe and Ito).
const VMS: [Colour; 7] = [
    colour("#0072b2", 25, true),
    colour("#e69f00", 214, false),
    colour("#009e73", 36, true),
    colour("#cc79a7", 175, false),
    colour("#56b4e9", 74, false),
    colour("#d55e00", 166, true),
    colour("#f0e442", 227, false),
];
const OTHER: Colour = colour("#555555", 240, true);
const UNKNOWN: Colour = colour("#ffffff", 231, false);

impl Who {
    /// What stands for it in a row. Letters and colours of VMs begin anew when there are no more.
    pub(super) fn letter(self) -> char {
        match self {
            Self::Vm(vm) => char::from(b'A' + (vm % 26) as u8),
            Self::Other => '+',
            Self::Idle => '.',
            Self::Unknown => '?',
        }
    }

    /// Its colour; none where nobody runs.
    pub(super) fn colour(self) -> Option<&'static Colour> {
        match self {
            Self::Vm(vm) => Some(&VMS[vm % VMS.len()]),
            Self::Other => Some(&OTHER),
            Self::Idle => None,
            Self::Unknown => Some(&UNKNOWN),
        }
    }
}

/// Whom the letters of `timeline` stand for: its VMs, and what else its `rows` show.
pub fn legend(timeline: &Timeline, rows: &[(u32, Vec<Who>)]) -> Vec<(Who, String)> {
    let vms = timeline.vms.iter().enumerate();
    let vms = vms.map(|(index, vm)| (Who::Vm(index), vm.name.clone()));
    let others = [
        (Who::Other, "another thread"),
        (Who::Idle, "idle"),
        (Who::Unknown, "not known"),
    ];
    let shown = |who| rows.iter().any(|(_, row)| row.contains(&who));
    let others = others.into_iter().filter(|(who, _)| shown(*who));
    vms.chain(others.map(|(who, name)| (who, name.to_owned())))
        .collect()
}

/// The number below a drawing.
pub fn side_by_side(timeline: &Timeline) -> String {
    let part = timeline.side_by_side();
    part.map_or("side by side: no VM ran".into(), |part| {
        format!("side by side: {:.0} %", 100.0 * part)
    })
}

/// What that number is.
pub const SIDE_BY_SIDE: &str = "Side by side: of the time in which a VM had any CPU, the part in which as many of its vCPUs \
     ran as can at once.";

/// Moments for an axis of `length_ns`, ms: at most `parts` equal parts, each of 1, 2 or 5 times a power of ten.
pub fn ticks_ms(length_ns: u64, parts: usize) -> Vec<u64> {
    let length_ms = length_ns / 1_000_000;
    let steps = (0..19).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    let mut steps = steps.filter(|step| length_ms / step <= parts.max(1) as u64);
    let step = steps.next().unwrap_or(u64::MAX);
    (0..=length_ms / step).map(|tick| tick * step).collect()
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::timeline;
    use super::*;

    #[test]
    fn an_axis_has_round_numbers() {
        const MS: u64 = 1_000_000;
        assert_eq!(ticks_ms(40 * MS, 10), [0, 5, 10, 15, 20, 25, 30, 35, 40]);
        assert_eq!(ticks_ms(10 * MS, 1), [0, 10]);
        assert_eq!(ticks_ms(25 * MS, 3), [0, 10, 20]);
        assert_eq!(ticks_ms(MS / 2, 10), [0]);
    }

    #[test]
    fn a_legend_names_what_is_shown() {
        let timeline = timeline(&[(1, 5, 11, 7)]);
        let legend = legend(&timeline, &timeline.rows(10));
        let letters: String = legend.iter().map(|(who, _)| who.letter()).collect();
        assert_eq!(letters, "AB+?");
        assert_eq!(legend[1].1, "vm2");
    }
}
