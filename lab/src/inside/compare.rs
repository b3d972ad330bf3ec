// SPDX-License-Identifier: GPL-2.0-only
//! `cohort compare` beside the VMs of a cell, as an operator runs it beside his: what he would see. Not a benchmark (`cell`), whose
//! windows begin from seeds.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;

use super::cell::Bench;
use super::info::LabInfo;
use super::windows::Subject;
use crate::cell::{Alone, Cell};

/// Where a VM's counter is for `--counter`.
const COUNTERS: &str = "/run/counters";
/// How often it is written.
const EACH: Duration = Duration::from_millis(1);
/// Rounds of one window per scheduler; fewer allow no verdict.
const ROUNDS: &str = "6";
/// The number whose plot is the picture; what `cohort compare` calls it.
const DRAWN: &str = "counters progress mean %";

/// What to leave behind.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The cell as JSON; `lab compare` has it from lab/published.toml
    cell: String,
    /// Write the page to this file
    #[arg(long, value_name = "FILE")]
    html: PathBuf,
    /// Write a plot of the page, as a picture, to this file
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
}

/// Compares the schedulers, and prints what `cohort compare` prints.
///
/// # Errors
/// When a VM does not start or `cohort compare` fails.
pub fn run(lab: &LabInfo, options: &Options) -> Result<()> {
    let cell: Cell = serde_json::from_str(&options.cell).context("That is no cell")?;
    cell.check()?;
    let mut bench = Bench::start(lab, &cell)?;
    let alone = bench.measure_each_kind()?;
    let alone = bench.alone_of_each(&alone)?;
    fs::create_dir_all(COUNTERS).with_context(|| format!("{COUNTERS} cannot be made"))?;
    let command = command(&cell, options, bench.names(), &alone);
    println!("{command:?}");
    bench.look(|vms| compare(command, vms))?;
    let page = fs::read_to_string(&options.html).context("there is no page")?;
    let plot =
        plot_of(&page, DRAWN).with_context(|| format!("the page has no plot of \"{DRAWN}\""))?;
    fs::write(&options.svg, plot)
        .with_context(|| format!("{} cannot be written", options.svg.display()))
}

fn command<'a>(
    cell: &Cell,
    options: &Options,
    names: impl Iterator<Item = &'a str>,
    alone: &[Alone],
) -> Command {
    let mut command = Command::new("cohort");
    command
        .arg("compare")
        .args(["--rounds", ROUNDS])
        .args(["--window", &format!("{}ms", cell.window_ms)])
        .args(["--settle", &format!("{}ms", cell.settle_ms)])
        .arg("--html")
        .arg(&options.html)
        .stdin(Stdio::null());
    for (name, alone) in names.zip(alone) {
        let counter = format!("{}-{name}", cell.vms[0].workload.name());
        command
            .arg("--counter")
            .arg(format!("{counter}=cat {COUNTERS}/{name}"))
            .arg("--alone")
            .arg(format!("{counter}={:.1}", alone.rate));
    }
    command
}

/// Runs `command` while `vms` run, and has their counters where it looks for them.
fn compare(mut command: Command, vms: &[Box<dyn Subject>]) -> Result<()> {
    let write = || vms.iter().try_for_each(|vm| write_counter(&**vm));
    write()?;
    let mut process = command.spawn().context("cohort cannot be started")?;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        write()?;
        sleep(EACH);
    };
    ensure!(status.success(), "cohort compare ended with {status}");
    Ok(())
}

/// Whoever reads it meanwhile has it complete.
fn write_counter(vm: &dyn Subject) -> Result<()> {
    let path = Path::new(COUNTERS).join(vm.name());
    let unfinished = path.with_extension("new");
    fs::write(&unfinished, vm.operations()?.to_string())
        .and_then(|()| fs::rename(&unfinished, &path))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// The picture in `page` that has `caption`.
fn plot_of<'a>(page: &'a str, caption: &str) -> Option<&'a str> {
    let end = "</svg>";
    page.split_inclusive(end)
        .filter_map(|part| part.find("<svg").map(|begin| &part[begin..]))
        .find(|plot| plot.lines().any(|line| line.trim() == caption))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plot_with_the_caption_is_found_in_the_page() {
        let page = "<p>a b</p><svg 1>\n<text>\nx\n</text>\n</svg>\n<svg 2>\n<text>\na b\n</text>\n</svg>\n</html>";
        assert_eq!(
            plot_of(page, "a b"),
            Some("<svg 2>\n<text>\na b\n</text>\n</svg>")
        );
        assert_eq!(plot_of(page, "b"), None);
    }
}
