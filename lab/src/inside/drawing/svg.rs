// SPDX-License-Identifier: GPL-2.0-only
//! Timelines drawn as one self-contained SVG picture, one above the other. Not for terminals (`text`).
use std::fmt::{Display, Write as _};

use cohort::commands::compare::html::escaped;

use super::palette::{SIDE_BY_SIDE, legend, side_by_side, ticks_ms};
use super::timeline::{Timeline, Who};

const WIDTH: usize = 900;
const MARGIN: usize = 20;
/// Where time begins: right of the names of CPUs.
const LEFT: usize = 74;
const TIME_WIDTH: usize = WIDTH - LEFT - MARGIN;
/// Columns per pixel, so that edges are exact enough and the picture stays small however many switches there are.
const COLUMNS_PER_PIXEL: usize = 2;
const ROW_HEIGHT: usize = 26;
/// From one row to the next.
const ROW_STEP: usize = 30;
const TITLE_HEIGHT: usize = 36;
const AXIS_HEIGHT: usize = 44;
const FOOT_HEIGHT: usize = 54;
/// A letter needs so many pixels.
const LETTER_WIDTH: usize = 14;
const MOST_TICKS: usize = 10;

const BLACK: &str = "#1a1a1a";
const GREY: &str = "#595959";
const LINE: &str = "#999999";
/// Behind rows, so that it shows where nobody runs.
const NOBODY: &str = "#eeeeee";

/// A picture of `timelines`, one above the other, with one legend.
pub fn svg(timelines: &[Timeline]) -> String {
    let mut picture = Picture::default();
    let mut y = MARGIN / 2;
    for timeline in timelines {
        y = picture.timeline(timeline, y);
    }
    picture.foot(timelines, y);
    picture.finish(y + FOOT_HEIGHT)
}

/// What is in the picture so far.
#[derive(Default)]
struct Picture(String);

#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Picture {
    /// Draws one timeline from `top` on; where it ends.
    fn timeline(&mut self, timeline: &Timeline, top: usize) -> usize {
        self.title(timeline, top + 22);
        let first = top + TITLE_HEIGHT;
        for (index, (cpu, row)) in rows(timeline).iter().enumerate() {
            self.row(*cpu, row, first + index * ROW_STEP);
        }
        let bottom = first + timeline.cpus.len() * ROW_STEP;
        self.axis(timeline.length_ns, bottom);
        bottom + AXIS_HEIGHT
    }

    fn title(&mut self, timeline: &Timeline, y: usize) {
        let title = format!("{}, {} ms", timeline.title, timeline.length_ns / 1_000_000);
        let bold = " font-size=\"16\" font-weight=\"bold\"";
        self.text((LEFT, y), Anchor::Start, BLACK, bold, &title);
        let right = (WIDTH - MARGIN, y);
        self.text(right, Anchor::End, BLACK, bold, &side_by_side(timeline));
    }

    fn row(&mut self, cpu: u32, row: &[Who], y: usize) {
        let base = y + ROW_HEIGHT / 2 + 5;
        let name = format!("CPU {cpu}");
        self.text((LEFT - 8, base), Anchor::End, GREY, "", &name);
        self.rectangle((LEFT, y), (TIME_WIDTH, ROW_HEIGHT), NOBODY);
        let mut column = 0;
        for same in row.chunk_by(Who::eq) {
            self.block(same[0], column, same.len(), y);
            column += same.len();
        }
    }

    /// Somebody has a CPU for some columns.
    fn block(&mut self, who: Who, column: usize, columns: usize, y: usize) {
        let Some(colour) = who.colour() else {
            return;
        };
        let pixels = |columns: usize| columns as f64 / COLUMNS_PER_PIXEL as f64;
        let x = LEFT as f64 + pixels(column);
        let width = pixels(columns);
        self.rectangle((x, y), (width, ROW_HEIGHT), colour.ground);
        if width >= LETTER_WIDTH as f64 {
            let middle = (x + width / 2.0, y + ROW_HEIGHT / 2 + 5);
            let letter = who.letter().to_string();
            self.text(middle, Anchor::Middle, colour.ink, "", &letter);
        }
    }

    fn axis(&mut self, length_ns: u64, y: usize) {
        self.rectangle((LEFT, y), (TIME_WIDTH, 1), LINE);
        for tick in ticks_ms(length_ns, MOST_TICKS) {
            let part = tick as f64 * 1e6 / length_ns as f64;
            let x = LEFT as f64 + TIME_WIDTH as f64 * part;
            self.rectangle((x - 0.5, y), (1, 5), LINE);
            let label = tick.to_string();
            self.text((x, y + 19), Anchor::Middle, GREY, "", &label);
        }
        self.text((LEFT - 16, y + 19), Anchor::End, GREY, "", "ms");
    }

    /// The legend, and what the number means.
    fn foot(&mut self, timelines: &[Timeline], top: usize) {
        let mut x = LEFT;
        for (who, name) in common_legend(timelines) {
            let ground = who.colour().map_or(NOBODY, |colour| colour.ground);
            let ink = who.colour().map_or(BLACK, |colour| colour.ink);
            self.rectangle((x, top), (18, 18), ground);
            let letter = who.letter().to_string();
            self.text((x + 9, top + 14), Anchor::Middle, ink, "", &letter);
            self.text((x + 25, top + 14), Anchor::Start, BLACK, "", &name);
            // Letters of the font are about eight pixels wide.
            x += 25 + 8 * name.chars().count() + 24;
        }
        let small = " font-size=\"12\"";
        self.text((LEFT, top + 38), Anchor::Start, GREY, small, SIDE_BY_SIDE);
    }

    fn rectangle(
        &mut self,
        (x, y): (impl Display, impl Display),
        (width, height): (impl Display, impl Display),
        fill: &str,
    ) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            self.0,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>"
        );
    }

    fn text(
        &mut self,
        (x, y): (impl Display, impl Display),
        anchor: Anchor,
        fill: &str,
        attributes: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.0,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" fill=\"{fill}\"{attributes}>{}</text>",
            escaped(text)
        );
    }

    /// The whole file. A ground of its own makes it readable on pages of any colour.
    fn finish(self, height: usize) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"14\" role=\"img\">\n\
             <title>Which VM's vCPUs run on which CPU when</title>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" rx=\"6\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.0
        )
    }
}

fn rows(timeline: &Timeline) -> Vec<(u32, Vec<Who>)> {
    timeline.rows(TIME_WIDTH * COLUMNS_PER_PIXEL)
}

fn common_legend(timelines: &[Timeline]) -> Vec<(Who, String)> {
    let mut entries = Vec::new();
    for timeline in timelines {
        entries.extend(legend(timeline, &rows(timeline)));
    }
    entries.sort();
    entries.dedup_by_key(|(who, _)| *who);
    entries
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::timeline;
    use super::*;

    /// Checks that every element is closed in its order and has its attributes once each, in quotes, and that text holds
    /// no character that means something else; the names of all elements. For what this module writes, not for all XML.
    fn elements(text: &str) -> Vec<String> {
        let mut open = Vec::new();
        let mut names = Vec::new();
        let mut parts = text.split('<');
        assert_eq!(parts.next(), Some(""), "it begins with an element");
        for part in parts {
            let (tag, text) = part.split_once('>').expect("each tag ends");
            assert!(!text.contains('>'), "{text}");
            for entity in text.split('&').skip(1) {
                let known = ["amp;", "lt;", "gt;"]
                    .iter()
                    .any(|it| entity.starts_with(it));
                assert!(known, "{text}");
            }
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name));
                continue;
            }
            let (name, attributes) = tag.split_once(' ').unwrap_or((tag, ""));
            let closed = attributes.strip_suffix('/');
            check_attributes(closed.unwrap_or(attributes));
            names.push(name.to_owned());
            if closed.is_none() {
                open.push(name.to_owned());
            }
        }
        assert!(open.is_empty(), "{open:?} are not closed");
        names
    }

    fn check_attributes(text: &str) {
        let mut seen = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let (name, value) = rest.split_once("=\"").expect("an attribute has a value");
            let (_, after) = value.split_once('"').expect("a value ends");
            assert!(!seen.contains(&name), "{name} twice in {text}");
            seen.push(name);
            rest = after.trim_start();
        }
    }

    #[test]
    fn a_picture_is_well_formed_and_has_all_that_is_drawn() {
        let mut stock = timeline(&[(1, 5, 11, 21), (2, 5, 22, 0)]);
        stock.title = "<stock> & \"others\"".into();
        let mut cohort = timeline(&[(1, 5, 11, 21), (2, 5, 12, 22), (2, 6, 22, 7)]);
        cohort.title = "Cohort".into();
        let picture = svg(&[stock, cohort]);
        let names = elements(&picture);
        assert_eq!(names[..3], ["svg", "title", "rect"]);
        for part in [
            "&lt;stock&gt; &amp; \"others\", 10 ms",
            ">Cohort, 10 ms<",
            ">side by side: 0 %<",
            ">CPU 2<",
            ">vm1<",
            ">idle<",
            ">another thread<",
            ">10<",
        ] {
            assert!(picture.contains(part), "no {part} in {picture}");
        }
        assert_eq!(picture.matches(">vm2<").count(), 1);
    }

    #[test]
    fn a_block_lies_where_its_time_is() {
        let picture = svg(&[timeline(&[(1, 5, 11, 21)])]);
        let middle = LEFT + TIME_WIDTH / 2;
        let block = format!(
            "<rect x=\"{middle}\" y=\"46\" width=\"{}\" height=\"{ROW_HEIGHT}\" fill=\"#e69f00\"/>",
            TIME_WIDTH / 2
        );
        assert!(picture.contains(&block), "no {block} in {picture}");
    }
}
