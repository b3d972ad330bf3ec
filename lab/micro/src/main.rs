// SPDX-License-Identifier: GPL-2.0-only
//! The `micro` program: runs one micro guest in one process. All it does is in the library.

use std::path::PathBuf;
use std::process::exit;

use anyhow::{Context, Result};
use clap::Parser;
use cohort_micro::{Quantity, Spec, calibrate, vmm};

/// Runs a virtual machine without a kernel, whose vCPUs run short programs under KVM.
///
/// Ends on SIGTERM, SIGINT or after --seconds with exit code 0, and prints one line of JSON with the totals. A vCPU that
/// cannot go on, or a guest that cannot start, is exit code 1 and a sentence on the standard error. At SIGUSR1 a new
/// thread takes each vCPU over.
#[derive(Parser)]
#[command(version, after_help = LANGUAGE)]
struct Arguments {
    /// Name of the guest
    #[arg(long)]
    name: Option<String>,
    /// Shared memory to put the counters into, on a tmpfs; it stays when the guest ends [default: not visible]
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Adds a vCPU that runs this program
    #[arg(long = "vcpu", value_name = "PROGRAM")]
    vcpus: Vec<String>,
    /// Adds N vCPUs that only halt, after those with programs
    #[arg(long, value_name = "N", default_value_t = 0)]
    idle_vcpus: usize,
    /// Takes all of the guest from a JSON file; its keys are these options' names with `_` (`vcpus` for the programs)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["vcpus", "idle_vcpus", "memory_mib", "pause_window",
          "iterations_per_ms", "hlt_passthrough", "pause_passthrough", "count_exits"])]
    scenario: Option<PathBuf>,
    /// RAM of the guest in MiB, 2 to 1024
    #[arg(long, value_name = "MIB", default_value_t = Spec::default().memory_mib)]
    memory_mib: u64,
    /// Spin loops execute one PAUSE per this many iterations, or per this time (20us). On hardware 1 is natural; an
    /// emulated host exits at each PAUSE, where hardware exits after a window of them
    #[arg(long, value_name = "N|TIME", default_value_t = Spec::default().pause_window)]
    pause_window: Quantity,
    /// Iterations of `compute` per millisecond, for amounts given as times [default: measured at the start]
    #[arg(long, value_name = "N")]
    iterations_per_ms: Option<u64>,
    /// HLT does not exit to the host
    #[arg(long)]
    hlt_passthrough: bool,
    /// PAUSE does not exit to the host
    #[arg(long)]
    pause_passthrough: bool,
    /// Adds KVM's statistics of the vCPUs to the totals
    #[arg(long)]
    count_exits: bool,
    /// Ends after so many seconds [default: on a signal only]
    #[arg(long)]
    seconds: Option<u64>,
    /// Ends when this process does, and removes the state file then
    #[arg(long, value_name = "PID")]
    parent: Option<i32>,
    /// Prints the iterations of `compute` per millisecond on this machine and ends
    #[arg(long, exclusive = true)]
    calibrate: bool,
}

const LANGUAGE: &str = "\
Programs: steps separated by `;`. What follows `loop:` repeats; without it the vCPU halts for good after the last step.
Amounts N are numbers, or times such as 250ns, 100us, 4ms.
  compute N              N iterations of a register-only loop
  spin FLAG [round]      spins until FLAG is not 0, or is at least the number of this pass
  pause N                N times PAUSE
  set, clear, add FLAG   FLAG becomes 1, 0, one more
  lock, unlock [NAME]    a fair ticket lock
  barrier [NAME]         all vCPUs whose program names it meet
  sleeping-barrier VECTOR [NAME]
                         the same, waiting halted; the last to arrive wakes the others by an IPI
  ipi VCPU VECTOR        sends an IPI (vectors 0x30 to 0xeb); its receiver's handler answers it
  wait-answer            spins until the last IPI was answered, and counts the latency
  shootdown VECTOR       sends an IPI to all other vCPUs and spins until each has answered; VECTOR is its alone
  halt                   halts until an interrupt has arrived since the last halt
  timer N                arms the timer, which interrupts: `timer 1ms; halt`
  sleep N                arms the timer and halts until it has fired, whatever else arrives; counts how late that was
  user, kernel           what follows runs at CPL 3, CPL 0; what sends, halts, sleeps or masks needs kernel
  mask, unmask           in between, IPIs are not answered
  stamp SLOT             reads the TSC into slot 0 to 15

  micro --seconds 1 --vcpu 'loop: compute 10us; ipi 1 0x41; wait-answer' --vcpu 'loop: halt'";

fn main() {
    let arguments = Arguments::parse();
    let result = run(arguments);
    if let Err(error) = &result {
        eprintln!("micro: {error:#}");
    }
    // Not by returning: vCPU threads still run.
    exit(i32::from(result.is_err()));
}

fn run(arguments: Arguments) -> Result<()> {
    if arguments.calibrate {
        println!("{}", calibrate::iterations_per_ms());
        return Ok(());
    }
    let parent = arguments.parent;
    let totals = vmm::run(&spec(arguments)?, parent)?;
    println!(
        "{}",
        serde_json::to_string(&totals).context("the totals cannot be written as JSON")?
    );
    Ok(())
}

fn spec(arguments: Arguments) -> Result<Spec> {
    let mut spec = match &arguments.scenario {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("{} cannot be read", path.display()))?;
            serde_json::from_str(&text)
                .with_context(|| format!("{} is not a scenario", path.display()))?
        }
        None => Spec {
            vcpus: arguments.vcpus,
            idle_vcpus: arguments.idle_vcpus,
            memory_mib: arguments.memory_mib,
            pause_window: arguments.pause_window,
            iterations_per_ms: arguments.iterations_per_ms,
            hlt_passthrough: arguments.hlt_passthrough,
            pause_passthrough: arguments.pause_passthrough,
            count_exits: arguments.count_exits,
            ..Spec::default()
        },
    };
    spec.name = arguments.name.unwrap_or(spec.name);
    spec.state = arguments.state.or(spec.state);
    spec.seconds = arguments.seconds.or(spec.seconds);
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_options_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_command_of_a_spec_is_read_back() {
        let mut expected = Spec::new("a")
            .vcpu("loop: halt")
            .vcpu("compute 3us")
            .idle_vcpus(3)
            .state("/run/a");
        expected = expected
            .pause_window("20us".parse().unwrap())
            .iterations_per_ms(9)
            .count_exits();
        expected = expected.hlt_passthrough().pause_passthrough();
        expected.seconds = Some(2);
        let command = expected.command(Path::new("micro"));
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        assert_eq!(
            spec(Arguments::try_parse_from(words).unwrap()).unwrap(),
            expected
        );
    }
}
