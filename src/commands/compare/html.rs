// SPDX-License-Identifier: GPL-2.0-only
//! A comparison as one HTML page that needs nothing else: the table, and of each number its windows in the order in
//! which they ran.

use super::report::{Comparison, NOTES, label, number};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::fmt::Write as _;

const SIZE: (u32, u32) = (760, 220);
/// Told apart in print and by those who see no red or green, too (Okabe and Ito).
const COLOURS: [RGBColor; 4] = [
    RGBColor(0, 0, 0),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
];
const STYLE: &str = "body{font:15px/1.4 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.2em .6em;border-bottom:1px solid #ccc}\
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}";

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn page(comparison: &Comparison) -> Result<String> {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>cohort compare</title><style>{STYLE}</style>\n\
         <h1>{}</h1>\n<p>{}</p>\n<table><tr><th>number<th>scheduler<th class=n>median<th class=n>ratio<th class=n>interval<th class=n>worst pair<th>verdict\n",
        escaped(&comparison.schedulers.join(" against ")),
        escaped(&comparison.headline())
    );
    for compared in &comparison.numbers {
        let mut name = label(&compared.metric);
        for (scheduler, under) in comparison.schedulers.iter().zip(&compared.schedulers) {
            let (ratio, interval) = under.ratio.as_ref().map_or_else(Default::default, |ratio| {
                (
                    format!("{:.3}", ratio.median),
                    format!(
                        "{:.3} to {:.3} ({:.0} %)",
                        ratio.low,
                        ratio.high,
                        ratio.confidence * 100.0
                    ),
                )
            });
            let worst = under.worst.map(|worst| format!("{worst:.3}"));
            // Writing to a String cannot fail.
            let _ = writeln!(
                html,
                "<tr><td>{}<td>{}<td class=n>{}<td class=n>{ratio}<td class=n>{interval}<td class=n>{}<td>{}",
                escaped(&std::mem::take(&mut name)),
                escaped(scheduler),
                number(under.median),
                worst.unwrap_or_default(),
                escaped(&under.verdict)
            );
        }
    }
    html += "</table>\n";
    for left_out in &comparison.left_out {
        let _ = writeln!(
            html,
            "<p>{}: not in all windows, so not compared.</p>",
            escaped(left_out)
        );
    }
    for remark in &comparison.setting.remarks {
        let _ = writeln!(html, "<p>{}</p>", escaped(remark));
    }
    let _ = writeln!(html, "<p>{}</p>\n<h2>All windows</h2>", escaped(NOTES));
    for compared in &comparison.numbers {
        html += &plot(comparison, &compared.metric)?;
    }
    Ok(html + "</html>\n")
}

/// The windows of one number, a line per scheduler.
fn plot(comparison: &Comparison, metric: &super::window::Metric) -> Result<String> {
    let mut svg = String::new();
    let values = |scheduler: &str| -> Vec<(f64, f64)> {
        let windows = comparison.windows.iter().enumerate();
        windows
            .filter(|(_, window)| window.scheduler == scheduler)
            .map(|(at, window)| (at as f64 + 1.0, window.numbers[metric]))
            .collect()
    };
    let most = comparison
        .windows
        .iter()
        .map(|window| window.numbers[metric])
        .fold(f64::MIN_POSITIVE, f64::max);
    let draw = |svg: &mut String| -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        let last = comparison.windows.len() as f64 + 0.5;
        let mut chart = ChartBuilder::on(&area)
            .caption(label(metric), ("sans-serif", 15))
            .margin(8)
            .x_label_area_size(28)
            .y_label_area_size(64)
            .build_cartesian_2d(0.5..last, 0.0..most * 1.1)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("window")
            .x_label_formatter(&|at| format!("{at:.0}"))
            .y_label_formatter(&|value| number(*value))
            .draw()?;
        for (scheduler, colour) in comparison.schedulers.iter().zip(COLOURS.iter().cycle()) {
            let colour = *colour;
            chart
                .draw_series(LineSeries::new(values(scheduler), colour).point_size(3))?
                .label(scheduler)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        area.present()
    };
    draw(&mut svg).map_err(|error| anyhow!("{} cannot be drawn: {error}", label(metric)))?;
    Ok(svg + "\n")
}

/// Text as HTML and SVG have it between tags. Names come from guests' owners.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::report::Setting;
    use super::super::window::{Better, Metric, Window};
    use super::*;

    #[test]
    fn a_page_has_a_plot_per_number_and_names_are_text() {
        let metric = Metric {
            of: "<b>web</b>".into(),
            name: "%RDY".into(),
            better: Better::Less,
        };
        let windows = (0..4).map(|at| Window {
            round: at / 2,
            scheduler: ["stock", "cohort"][at % 2].into(),
            seconds: 1.0,
            numbers: [(metric.clone(), at as f64 + 1.0)].into(),
        });
        let names = vec!["stock".to_owned(), "cohort".to_owned()];
        let setting = Setting {
            remarks: vec!["1 < 2".into()],
            ..Setting::default()
        };
        let comparison =
            Comparison::of(setting, windows.collect(), names).expect("it can be compared");
        let page = page(&comparison).expect("it can be drawn");
        assert_eq!(page.matches("<svg").count(), 1);
        assert!(!page.contains("<b>") && page.contains("&lt;b&gt;web"));
        assert!(page.contains("<p>1 &lt; 2</p>"));
        assert!(!page.contains("http-equiv") && !page.contains("<script"));
    }
}
