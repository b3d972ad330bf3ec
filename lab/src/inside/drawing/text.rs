// SPDX-License-Identifier: GPL-2.0-only
//! A timeline drawn for a terminal, one letter per column and CPU. Not for pictures (`svg`).
use super::palette::{SIDE_BY_SIDE, legend, side_by_side, ticks_ms};
use super::timeline::{Timeline, Who};

/// How many columns of time fit beside the names of CPUs on most terminals.
pub const COLUMNS: usize = 100;
/// What a label of the axis takes, with some space.
const LABEL_COLUMNS: usize = 10;

/// `timeline` in `columns` of time, with ANSI colours or without; lines with their ends.
pub fn text(timeline: &Timeline, columns: usize, colours: bool) -> String {
    let rows = timeline.rows(columns);
    let names: Vec<String> = rows.iter().map(|(cpu, _)| format!("CPU {cpu}")).collect();
    let margin = names.iter().map(String::len).max().unwrap_or_default() + 2;
    let mut lines = vec![
        format!("{}, {} ms", timeline.title, timeline.length_ns / 1_000_000),
        String::new(),
    ];
    for (name, (_, row)) in names.iter().zip(&rows) {
        lines.push(format!("{name:margin$}{}", letters(row, colours)));
    }
    let indent = " ".repeat(margin);
    lines.extend(axis(timeline.length_ns, columns).map(|line| indent.clone() + &line));
    let legend = legend(timeline, &rows);
    let legend = legend
        .iter()
        .map(|(who, name)| format!("{} {name}", letters(&[*who], colours)));
    lines.push(String::new());
    lines.push(indent + &legend.collect::<Vec<_>>().join("   "));
    lines.push(String::new());
    lines.push(side_by_side(timeline));
    lines.push(format!("({SIDE_BY_SIDE})"));
    lines.join("\n") + "\n"
}

/// One letter per column; equal neighbours share one change of colour.
fn letters(row: &[Who], colours: bool) -> String {
    let stretch = |same: &[Who]| {
        let letters: String = same.iter().map(|who| who.letter()).collect();
        match same[0].colour().filter(|_| colours) {
            Some(colour) => format!(
                "\x1b[38;5;{};48;5;{}m{letters}\x1b[0m",
                colour.terminal_ink, colour.terminal_ground
            ),
            None => letters,
        }
    };
    row.chunk_by(Who::eq).map(stretch).collect()
}

/// A line of marks and one of labels.
fn axis(length_ns: u64, columns: usize) -> [String; 2] {
    let ticks = ticks_ms(length_ns, columns / LABEL_COLUMNS);
    let (mut marks, mut labels) = (String::new(), String::new());
    for tick in &ticks {
        let column = (*tick * 1_000_000 * columns as u64 / length_ns.max(1)) as usize;
        marks = format!("{marks:column$}|");
        labels = format!("{labels:column$}{tick}");
    }
    [marks, labels + " ms"]
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::timeline;
    use super::*;

    #[test]
    fn a_drawing_has_a_title_rows_an_axis_a_legend_and_the_number() {
        let timeline = timeline(&[(1, 4, 11, 21), (2, 6, 12, 7), (2, 7, 7, 22), (1, 9, 21, 0)]);
        let expected = "\
stock scheduler, 10 ms

CPU 1  AAAAAAAABBBBBBBBBB..
CPU 2  AAAAAAAAAAAA++BBBBBB
       |         |         |
       0         5         10 ms

       A vm1   B vm2   + another thread   . idle

side by side: 50 %
(Side by side: of the time in which a VM had any CPU, the part in which as many of its vCPUs ran as can at once.)
";
        assert_eq!(text(&timeline, 20, false), expected);
    }

    #[test]
    fn colours_only_surround_letters() {
        let timeline = timeline(&[(1, 5, 11, 0), (2, 5, 12, 7)]);
        let coloured = text(&timeline, 10, true);
        let blue = "CPU 1  \x1b[38;5;231;48;5;25mAAAAA\x1b[0m.....\n";
        assert!(coloured.contains(blue), "{coloured:?}");
        let mut plain = String::new();
        for part in coloured.split('\x1b') {
            plain += part
                .split_once('m')
                .filter(|_| part.starts_with('['))
                .map_or(part, |it| it.1);
        }
        assert_eq!(plain, text(&timeline, 10, false));
    }
}
