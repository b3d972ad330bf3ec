// SPDX-License-Identifier: GPL-2.0-only
//! `lab report`: makes docs/results.md from the results of the bench, all of it, and keeps those in docs/results/. Not for
//! measuring, and not for judging what a figure means, but for whether Cohort reaches what is published.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use cohort::commands::compare::statistics::{least_and_most, median};

use super::bench::{Kept, MATRIX, PUBLISHED, RESULTS};
use super::machine::Kind;
use super::tool::io_sentence;
use crate::cell::{Cell, CellResult, Latency, Matrix, Miss, Published, Run, STOCK, Variant};

const DEFAULT_OUT: &str = "docs/results.md";
/// Where the results are that it shows.
const SHOWN: &str = "docs/results";
/// What no table here can show.
const NOT_MODELLED: &str = "The machine does not model caches, memory bandwidth, branch prediction, SMT siblings that slow \
                            each other, or NUMA latency.";

const INTRODUCTION: &str = "\
# Results

`lab report` writes this file from the results of `make bench`, which are in `docs/results/`; nothing in it is written by hand. The
cells are those of `lab/matrix.toml`, and in the last two chapters those of `lab/published.toml`.

## Words

- **Alone**: what a VM does per second when it is the only one on the host, under the stock scheduler. Of VMs that are alike one
  is shown.
- **Share**: the part of the CPU time it uses alone that a VM is entitled to beside the others: the max-min fair part by weight.
- **Progress** of a VM: its rate, divided by its share of its rate alone. 1 is exactly its own, whatever its size, weight and
  work; more is possible where others leave CPU time unused, or where the VM alone wastes some.
- **Harmonic mean** of all progress: low when one VM gets little, so it shows efficiency and fairness in one number.
- **Least**: the progress of the VM that gets least.
- **Sum**: all rates, each as a part of that VM's rate alone: how many VMs' work was done.
- **Seed**: one way to start. The figures of one start repeat; how vCPUs happen to lie to each other is what varies. A seed
  decides in which order the VMs begin, and when each CPU takes them up, within 8 ms. Each scheduler has a window from each seed.

Figures are the median over the seeds; in parentheses the worst and the best of them. Schedulers are the stock one, Cohort, Cohort
without co-scheduling (`cohorts` off), and Cohort without yields (`yield`, `ipi` and `relaxed` off). Work of the host
beside VMs is counted as a VM is.
";

/// Options of `lab report`.
#[derive(Debug, Args)]
pub struct Options {
    /// Results of cells [default: all in docs/results, where new ones from the exact machine are put first]
    results: Vec<PathBuf>,
    /// The file to write
    #[arg(long, default_value = DEFAULT_OUT)]
    out: PathBuf,
}

/// Writes the file.
///
/// # Errors
/// When the matrix or a result cannot be read, or the file cannot be written.
pub fn report(options: &Options) -> Result<u8> {
    let matrix = Matrix::read(Path::new(MATRIX))?;
    let published = Matrix::read(Path::new(PUBLISHED))?;
    let paths = match options.results.is_empty() {
        true => {
            take_new(Path::new(RESULTS), Path::new(SHOWN))?;
            kept_in(Path::new(SHOWN))?
        }
        false => options.results.clone(),
    };
    let mut results = Vec::new();
    for path in paths {
        let result = Kept::read(&path)?.result;
        if [&matrix, &published]
            .iter()
            .any(|of| of.cells.contains(&result.cell))
        {
            results.push(result);
        } else {
            eprintln!(
                "lab: {} is of no cell that {MATRIX} or {PUBLISHED} has now; it is left out",
                path.display()
            );
        }
    }
    fs::write(&options.out, markdown(&matrix, &published, &results)).map_err(|error| {
        io_sentence(
            &format!("{} cannot be written", options.out.display()),
            &error,
        )
    })?;
    println!("{} is written", options.out.display());
    Ok(0)
}

/// What was `measured` since replaces what is `shown` of these cells. Results of another kernel than the newest one are not
/// shown: their names have an `@`. Nor are results from another machine than the exact one.
fn take_new(measured: &Path, shown: &Path) -> Result<()> {
    let cannot = |error| io_sentence(&format!("{} cannot be written", shown.display()), &error);
    fs::create_dir_all(shown).map_err(cannot)?;
    let mut from_elsewhere = false;
    for path in kept_in(measured)? {
        let name = path.file_name().unwrap_or_default();
        if name.to_string_lossy().contains('@') {
            continue;
        }
        if Kept::read(&path)?.result.lab.machine != Kind::Exact {
            from_elsewhere = true;
            continue;
        }
        fs::copy(&path, shown.join(name)).map_err(cannot)?;
    }
    if from_elsewhere {
        eprintln!(
            "lab: {0} has results that are not from the exact machine. {DEFAULT_OUT} leaves them out; `lab report --out other.md \
             {0}/*.json` shows them",
            measured.display()
        );
    }
    Ok(())
}

/// All results in a folder; none if there is no such folder.
fn kept_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Ok(Vec::new());
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("{} cannot be read", folder.display()))?
            .path();
        if path.extension().is_some_and(|ending| ending == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The whole file.
fn markdown(matrix: &Matrix, published: &Matrix, results: &[CellResult]) -> String {
    let mut text = INTRODUCTION.to_owned();
    text += &provenance(results);
    for (cpus, sockets) in sizes(matrix) {
        let cells = matrix.cells.iter();
        let cells: Vec<&Cell> = cells
            .filter(|cell| (cell.cpus, cell.sockets) == (cpus, sockets))
            .collect();
        text += &group(&title(cpus, sockets), &cells, results);
    }
    let cells: Vec<&Cell> = published.cells.iter().collect();
    let measured = cells
        .iter()
        .copied()
        .filter(|cell| best_result(cell, results).is_some());
    let measured: Vec<&Cell> = measured.collect();
    if !cells.is_empty() {
        text += &gains(&cells, results);
        text += &misses(&published.misses, &measured);
    }
    if !measured.is_empty() {
        text += &group(
            "Published cases: each scheduler's figures",
            &measured,
            results,
        );
    }
    text
}

/// What Cohort gains where something is published, beside that.
fn gains(cells: &[&Cell], results: &[CellResult]) -> String {
    let mut text = String::from(
        "\n## Published cases: what Cohort gains\n\nKernel patches that do a part of what Cohort does were published with gains. Here \
         are such cases, with KVM's paravirtual help on,\nas Linux guests have it. A gain is Cohort's figure over the stock scheduler's \
         from the same seed: the median over the seeds, in\nparentheses the worst and the best. Figures of the patches are from \
         hardware, v2 and v3 are versions of them. The goal is the\nhigher one, where there is one; it is reached if both medians are \
         at least that.\n\n\
         | cell | published | goal | gain, all VMs | gain, VM that does least | reached |\n|---|---|---|---|---|---|\n",
    );
    for cell in cells {
        if let Some(published) = &cell.published {
            line(
                &mut text,
                &gain_row(cell, published, best_result(cell, results)),
            );
        }
    }
    text
}

/// Why goals are missed, of the cells `measured`.
fn misses(misses: &[Miss], measured: &[&Cell]) -> String {
    let mut text = String::new();
    for Miss { cells, why } in misses {
        let is_measured = |name: &&String| measured.iter().any(|cell| cell.name == **name);
        let names: Vec<String> = cells
            .iter()
            .filter(is_measured)
            .map(|name| format!("`{name}`"))
            .collect();
        if names.is_empty() {
            continue;
        }
        if text.is_empty() {
            text += "\n**Where a goal is missed:**\n\n";
        }
        line(
            &mut text,
            &format!("- {}: {}", names.join(", "), why.trim()),
        );
    }
    text
}

fn gain_row(cell: &Cell, published: &Published, result: Option<&CellResult>) -> String {
    let Published {
        figure,
        goal_percent,
    } = published;
    let start = format!("| {} | {figure} | {goal_percent:+.1} % |", cell.name);
    let Some(result) = result else {
        return format!("{start} not measured | | |");
    };
    let gain = |number: fn(&Run) -> f64| gains_percent(result, number);
    let (all, least) = (gain(|run| run.progress.sum), gain(|run| run.progress.least));
    let reached = [&all, &least]
        .iter()
        .all(|gains| median(gains) >= *goal_percent);
    format!(
        "{start} {} | {} | {} |",
        percent(&all),
        percent(&least),
        if reached { "yes" } else { "no" }
    )
}

/// By how much Cohort is above the stock scheduler, from each seed, percent.
fn gains_percent(result: &CellResult, number: fn(&Run) -> f64) -> Vec<f64> {
    let of = |scheduler: &str| -> Vec<f64> {
        let runs = result.runs.iter().filter(|run| run.scheduler == scheduler);
        runs.map(number).collect()
    };
    let (stock, cohort) = (of(STOCK), of(&Variant::usual().name));
    let pairs = stock.iter().zip(&cohort);
    pairs
        .map(|(stock, cohort)| (cohort / stock - 1.0) * 100.0)
        .collect()
}

fn percent(gains: &[f64]) -> String {
    let (worst, best) = least_and_most(gains);
    format!("{:+.1} % ({worst:+.1}..{best:+.1})", median(gains))
}

/// The sizes of hosts, in the order in which the matrix has them first.
fn sizes(matrix: &Matrix) -> Vec<(u32, u32)> {
    let mut seen = BTreeSet::new();
    let sizes = matrix.cells.iter().map(|cell| (cell.cpus, cell.sockets));
    sizes.filter(|size| seen.insert(*size)).collect()
}

fn title(cpus: u32, sockets: u32) -> String {
    match sockets {
        1 => format!("{cpus} CPUs"),
        _ => format!("{cpus} CPUs in {sockets} domains"),
    }
}

/// Where the figures are from.
fn provenance(results: &[CellResult]) -> String {
    let labs: BTreeSet<String> = results.iter().map(|result| result.lab.origin()).collect();
    let mut text = String::from("\n## Where the figures are from\n\n");
    if labs.is_empty() {
        text += "Nothing is measured yet.\n";
    }
    for lab in labs {
        line(
            &mut text,
            &format!("- {lab}, Cohort {}", env!("CARGO_PKG_VERSION")),
        );
    }
    text
}

/// A chapter: what its cells are, their figures, and their latencies.
fn group(title: &str, cells: &[&Cell], results: &[CellResult]) -> String {
    let mut text = format!("\n## {title}\n\n");
    for cell in cells {
        line(&mut text, &format!("- `{}`: {cell}", cell.name));
    }
    text += "\n| cell | scheduler | harmonic mean | least | sum | progress of each | operations/s of each |\n|---|---|---|---|---|---|---|\n";
    for cell in cells {
        match best_result(cell, results) {
            Some(result) => text += &rows(result),
            None => line(
                &mut text,
                &format!("| {} | not measured | | | | | |", cell.name),
            ),
        }
    }
    text += &format!("\n{NOT_MODELLED}\n");
    text += &latencies(cells, results);
    text += &spins(cells, results);
    text += &ops(cells, results);
    text
}

/// How often vCPUs left their guests because they spun, in each cell in which they did.
fn spins(cells: &[&Cell], results: &[CellResult]) -> String {
    let rows: String = cells
        .iter()
        .filter_map(|cell| best_result(cell, results))
        .filter_map(spins_row)
        .collect();
    if rows.is_empty() {
        return rows;
    }
    format!(
        "\nPause-loop exits per second, of all VMs together: how often vCPUs left their guests because they spun. \"Alone\" is one VM \
         of each kind, alone. \"Fewer\" compares Cohort with the stock scheduler. Cells that are not here had fewer than {FEW_SPINS:.0} \
         each, or were measured before these exits were counted.\n\n\
         | cell | alone | stock | Cohort | fewer |\n|---|---|---|---|---|\n{rows}"
    )
}

/// Pause-loop exits per second that say nothing.
const FEW_SPINS: f64 = 20.0;

/// A cell in which hardly anybody spun has no row.
fn spins_row(result: &CellResult) -> Option<String> {
    let [alone @ .., stock, cohort] = result.spins.as_slice() else {
        return None;
    };
    let (stock, cohort) = (stock.per_s, cohort.per_s);
    if stock < FEW_SPINS && cohort < FEW_SPINS {
        return None;
    }
    let alone: Vec<String> = alone
        .iter()
        .map(|spins| format!("{:.0}", spins.per_s))
        .collect();
    // Of nothing nothing can be less.
    let fewer = if stock < 1.0 {
        String::new()
    } else {
        format!("{:.1} %", 100.0 * (1.0 - cohort / stock))
    };
    Some(format!(
        "| {} | {} | {stock:.0} | {cohort:.0} | {fewer} |\n",
        result.cell.name,
        alone.join(" ")
    ))
}

/// The ops that run most often; the table has a column for each.
const HOT_OPS: [&str; 9] = [
    "select_cpu",
    "enqueue",
    "dispatch",
    "running",
    "stopping",
    "runnable",
    "quiescent",
    "tick",
    "yield",
];

/// What Cohort's ops cost in each cell.
fn ops(cells: &[&Cell], results: &[CellResult]) -> String {
    let mut rows = String::new();
    for cell in cells {
        if let Some(result) = best_result(cell, results).filter(|result| !result.ops.is_empty()) {
            let of_op = |name: &&str| {
                let found = result.ops.iter().find(|cost| cost.name == *name);
                found.map_or(String::new(), |cost| {
                    (cost.ns / cost.runs.max(1)).to_string()
                })
            };
            let each: Vec<String> = HOT_OPS.iter().map(of_op).collect();
            line(
                &mut rows,
                &format!("| {} | {} |", cell.name, each.join(" | ")),
            );
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "\nInstructions that Cohort's ops execute, on average per call. The kernel's functions that they call are in it, and some 100 \
         of counting.\n\n| cell | {} |\n|---|{}\n{rows}",
        HOT_OPS.join(" | "),
        "---|".repeat(HOT_OPS.len())
    )
}

/// Of several results of a cell that with most schedulers.
fn best_result<'a>(cell: &Cell, results: &'a [CellResult]) -> Option<&'a CellResult> {
    let of_cell = results.iter().filter(|result| result.cell == *cell);
    of_cell.max_by_key(|result| result.runs.len())
}

/// A row for what each does alone, and one per scheduler.
fn rows(result: &CellResult) -> String {
    let mut text = String::new();
    let alone: Vec<String> = result
        .alone
        .iter()
        .map(|alone| format!("{:.0}", alone.rate))
        .collect();
    let row = format!(
        "| {} | alone | | | | | {} |",
        result.cell.name,
        alone.join(" ")
    );
    line(&mut text, &row);
    for (scheduler, runs) in by_scheduler(result) {
        let of_seeds = |number: &dyn Fn(&Run) -> f64| -> Vec<f64> {
            runs.iter().map(|run| number(run)).collect()
        };
        let means = of_seeds(&|run| run.progress.harmonic_mean);
        let (worst, best) = least_and_most(&means);
        let of_each = |number: &dyn Fn(&Run, usize) -> f64, decimals: usize| -> String {
            let members = 0..runs[0].progress.of_each.len();
            let medians = members.map(|member| median(&of_seeds(&|run| number(run, member))));
            let texts: Vec<String> = medians.map(|m| format!("{m:.decimals$}")).collect();
            texts.join(" ")
        };
        let row = format!(
            "| {} | {scheduler} | {:.3} ({:.3}..{:.3}) | {:.3} | {:.3} | {} | {} |",
            result.cell.name,
            median(&means),
            worst,
            best,
            median(&of_seeds(&|run| run.progress.least)),
            median(&of_seeds(&|run| run.progress.sum)),
            of_each(&|run, member| run.progress.of_each[member], 2),
            of_each(&|run, member| run.rates[member], 0)
        );
        line(&mut text, &row);
    }
    text
}

/// The runs of each scheduler, in the order in which they were made; none is empty.
fn by_scheduler(result: &CellResult) -> Vec<(&str, Vec<&Run>)> {
    let mut groups: Vec<(&str, Vec<&Run>)> = Vec::new();
    for run in &result.runs {
        match groups.iter_mut().find(|group| group.0 == run.scheduler) {
            Some(group) => group.1.push(run),
            None => groups.push((&run.scheduler, vec![run])),
        }
    }
    groups
}

/// A table of timed operations, if any cell of the group has some.
fn latencies(cells: &[&Cell], results: &[CellResult]) -> String {
    let mut rows = String::new();
    for cell in cells {
        if let Some(result) = best_result(cell, results) {
            rows += &latency_rows(result);
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "\nHow long timed operations took, in us: how late a sleeper went on (`latency`), a grace period (`rcu`), or the answer to a request (`redis`, `postgres`).\n\n\
         | cell | scheduler | whose | median | 99 % | longest |\n|---|---|---|---|---|---|\n{rows}\n{NOT_MODELLED}\n"
    )
}

fn latency_rows(result: &CellResult) -> String {
    let names: Vec<String> = result
        .cell
        .members()
        .into_iter()
        .map(|member| member.name)
        .collect();
    let mut text = String::new();
    for alone in &result.alone {
        if let Some(latency) = &alone.latency {
            latency_row(&mut text, &result.cell, "alone", &alone.name, &[latency]);
        }
    }
    for (scheduler, runs) in by_scheduler(result) {
        for (member, name) in names.iter().enumerate() {
            let timed = runs.iter().filter_map(|run| run.latencies[member].as_ref());
            let timed: Vec<&Latency> = timed.collect();
            if !timed.is_empty() {
                latency_row(&mut text, &result.cell, scheduler, name, &timed);
            }
        }
    }
    text
}

fn latency_row(text: &mut String, cell: &Cell, scheduler: &str, who: &str, timed: &[&Latency]) {
    let over_seeds = |number: fn(&Latency) -> f64| {
        let numbers: Vec<f64> = timed.iter().map(|latency| number(latency)).collect();
        let (best, worst) = least_and_most(&numbers);
        match numbers.len() {
            1 => format!("{best:.0}"),
            _ => format!("{:.0} ({worst:.0}..{best:.0})", median(&numbers)),
        }
    };
    let row = format!(
        "| {} | {scheduler} | {who} | {} | {} | {} |",
        cell.name,
        over_seeds(|latency| latency.p50_us),
        over_seeds(|latency| latency.p99_us),
        over_seeds(|latency| latency.longest_us)
    );
    line(text, &row);
}

fn line(text: &mut String, line: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{line}");
}

#[cfg(test)]
mod tests {
    use cohort::commands::compare::progress::{Progress, VmRate};

    use super::*;
    use crate::cell::{Alone, OpCost, SpinExits, Workload, example};
    use crate::inside::info;

    fn run(scheduler: &str, seed: u64, rates: [f64; 2], p99_us: Option<f64>) -> Run {
        let vms = rates.map(|rate| VmRate {
            rate,
            alone: 100.0,
            share: 0.5,
        });
        let latency = p99_us.map(|p99_us| Latency {
            count: 10,
            p50_us: 5.0,
            p99_us,
            longest_us: 2.0 * p99_us,
        });
        Run {
            scheduler: scheduler.into(),
            seed,
            seconds: 0.4,
            rates: rates.to_vec(),
            latencies: vec![latency, None],
            progress: Progress::of(&vms).unwrap(),
        }
    }

    fn result(cell: &Cell, p99_us: Option<f64>) -> CellResult {
        CellResult {
            cell: cell.clone(),
            lab: info::example(),
            alone: vec![Alone {
                name: "vm1".into(),
                rate: 100.0,
                cpus: 2.0,
                latency: None,
            }],
            runs: vec![
                run("stock", 1, [75.0, 25.0], p99_us),
                run("stock", 2, [50.0, 50.0], p99_us.map(|us| us * 2.0)),
                run("Cohort", 1, [50.0, 50.0], None),
                run("Cohort", 2, [50.0, 50.0], None),
            ],
            ops: Vec::new(),
            spins: Vec::new(),
        }
    }

    #[test]
    fn what_is_shown_is_from_the_exact_machine_and_the_newest_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let [measured, shown] = ["measured", "shown"].map(|name| folder.path().join(name));
        fs::create_dir(&measured).unwrap();
        for (name, machine) in [
            ("exact.json", Kind::Exact),
            ("exact@6.12.json", Kind::Exact),
            ("server.json", Kind::Hardware),
        ] {
            let mut result = result(&example(), None);
            result.lab.machine = machine;
            let kept = Kept {
                made_from: String::new(),
                took_s: 1,
                result,
            };
            let json = serde_json::to_string(&kept).unwrap();
            fs::write(measured.join(name), json).unwrap();
        }
        take_new(&measured, &shown).unwrap();
        assert_eq!(kept_in(&shown).unwrap(), [shown.join("exact.json")]);
    }

    #[test]
    fn the_file_has_a_table_per_size_of_host_and_names_what_is_not_measured() {
        let measured = example();
        let mut other = example();
        (other.name, other.cpus, other.sockets) = ("tlb-4x8".into(), 16, 2);
        other.vms[0].workload = Workload::Tlb;
        let matrix = Matrix {
            cells: vec![measured.clone(), other],
            ..Matrix::default()
        };
        let nothing = Matrix::default();
        let text = markdown(&matrix, &nothing, &[result(&measured, None)]);
        let expected = "
## 2 CPUs

- `lock-2x2`: 2 VMs of 2 vCPUs: lock (33 % locked); micro guests

| cell | scheduler | harmonic mean | least | sum | progress of each | operations/s of each |
|---|---|---|---|---|---|---|
| lock-2x2 | alone | | | | | 100 |
| lock-2x2 | stock | 0.875 (0.750..1.000) | 0.750 | 1.000 | 1.25 0.75 | 62 38 |
| lock-2x2 | Cohort | 1.000 (1.000..1.000) | 1.000 | 1.000 | 1.00 1.00 | 50 50 |

The machine does not model caches, memory bandwidth, branch prediction, SMT siblings that slow each other, or NUMA latency.

## 16 CPUs in 2 domains

- `tlb-4x8`: 2 VMs of 2 vCPUs: tlb; micro guests

| cell | scheduler | harmonic mean | least | sum | progress of each | operations/s of each |
|---|---|---|---|---|---|---|
| tlb-4x8 | not measured | | | | | |

The machine does not model caches, memory bandwidth, branch prediction, SMT siblings that slow each other, or NUMA latency.
";
        assert!(text.ends_with(expected), "{text}");
        assert!(text.contains("kernel 7.2.13"), "{text}");
    }

    #[test]
    fn timed_operations_have_a_table_of_their_own() {
        let cell = example();
        let text = latency_rows(&result(&cell, Some(100.0)));
        assert_eq!(
            text,
            "| lock-2x2 | stock | vm1 | 5 (5..5) | 150 (200..100) | 300 (400..200) |\n"
        );
    }

    #[test]
    fn gains_are_by_seed_and_the_goal_is_for_the_least_too() {
        let mut cell = example();
        let row = |cell: &Cell, result: Option<&CellResult>| {
            gain_row(cell, cell.published.as_ref().unwrap(), result)
        };
        let publish = |cell: &mut Cell, goal_percent| {
            cell.published = Some(Published {
                figure: "+9.8 % (v2)".into(),
                goal_percent,
            });
        };
        publish(&mut cell, 0.0);
        // From one seed the least gains 100 %, from the other one nothing; all together gain nothing.
        let measured = result(&cell, None);
        assert_eq!(
            row(&cell, Some(&measured)),
            "| lock-2x2 | +9.8 % (v2) | +0.0 % | +0.0 % (+0.0..+0.0) | +50.0 % (+0.0..+100.0) | yes |"
        );
        publish(&mut cell, 9.8);
        assert!(row(&cell, Some(&measured)).ends_with("| no |"));
        assert!(row(&cell, None).contains("| not measured |"));
    }

    #[test]
    fn why_a_goal_is_missed_stands_below_the_gains() {
        let cell = example();
        let miss = |name: &str| Miss {
            cells: vec!["elsewhere".into(), name.into()],
            why: "It is so.\n".into(),
        };
        let measured = [&cell];
        assert_eq!(
            misses(&[miss(&cell.name), miss("nowhere")], &measured),
            "\n**Where a goal is missed:**\n\n- `lock-2x2`: It is so.\n"
        );
        assert_eq!(misses(&[miss("nowhere")], &measured), "");
    }

    #[test]
    fn spins_are_compared_with_those_under_the_stock_scheduler() {
        let cell = example();
        let mut result = result(&cell, None);
        let of = |who: &str, per_s| SpinExits {
            who: who.into(),
            per_s,
        };
        let row = |result: &CellResult| {
            let text = spins(&[&cell], std::slice::from_ref(result));
            text.lines().last().unwrap_or_default().to_owned()
        };
        assert_eq!(row(&result), "");
        result.spins = vec![
            of("vm1", 10.0),
            of("vm3", 0.0),
            of("stock", 1000.0),
            of("Cohort", 50.0),
        ];
        assert_eq!(row(&result), "| lock-2x2 | 10 0 | 1000 | 50 | 95.0 % |");
        result.spins[2].per_s = 0.0;
        assert_eq!(row(&result), "| lock-2x2 | 10 0 | 0 | 50 |  |");
        result.spins[3].per_s = 0.0;
        assert_eq!(row(&result), "");
    }

    #[test]
    fn ops_that_ran_have_a_table() {
        let cell = example();
        let mut result = result(&cell, None);
        assert_eq!(ops(&[&cell], &[result.clone()]), "");
        let cost = |name: &str, runs, ns| OpCost {
            name: name.into(),
            runs,
            ns,
        };
        result.ops = vec![cost("dispatch", 10, 9000), cost("vcpu_kicked", 1, 50)];
        let text = ops(&[&cell], &[result]);
        assert!(
            text.ends_with("| lock-2x2 |  |  | 900 |  |  |  |  |  |  |\n"),
            "{text}"
        );
    }

    #[test]
    fn without_results_the_file_says_so() {
        let matrix = Matrix {
            cells: vec![example()],
            ..Matrix::default()
        };
        let text = markdown(&matrix, &matrix, &[]);
        assert!(text.contains("Nothing is measured yet."), "{text}");
    }

    #[test]
    fn of_two_results_of_a_cell_that_with_more_schedulers_is_shown() {
        let cell = example();
        let usual = result(&cell, None);
        let mut each = usual.clone();
        each.runs
            .push(run("Cohort without wake", 1, [1.0, 1.0], None));
        let results = [each.clone(), usual];
        assert_eq!(best_result(&cell, &results), Some(&each));
    }
}
