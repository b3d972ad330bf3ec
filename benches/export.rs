// SPDX-License-Identifier: GPL-2.0-only
//! What a scrape of a host with 1,000 VMs costs `cohort export`: time and memory, from a recording; alone, and beside 1,000
//! clients that are slow, silent or hostile. `make bench CASE=export`.

use anyhow::{Context, Result, ensure};
use cohort::observer::recording::{Kept, Recorder};
use cohort::observer::view::{HostView, TakerView, VcpuView, VmView};
use cohort::process::limits::raise_open_files;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const VMS: u32 = 1000;
const VCPUS: u32 = 4;
const SCRAPES: usize = 20;
const MOST_MS: f64 = 100.0;
const MOST_MIB: f64 = 50.0;
/// Clients that no honest scrape may wait for.
const HOSTILE: usize = 1000;
const ADDRESS: &str = "127.0.0.1:9746";
/// More often nothing is read.
const PAUSE: Duration = Duration::from_millis(600);

struct Export(Child);

impl Export {
    /// Returns when it has answered. Each scrape takes a window, for as long as there are any.
    fn start(windows: usize) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("recording");
        let mut recorder = Recorder::create(&path, Kept::default())?;
        for _ in 0..windows {
            recorder.add(&window())?;
        }
        let child = Command::new(env!("CARGO_BIN_EXE_cohort"))
            .args(["export", "--listen", ADDRESS, "--replay"])
            .arg(&path)
            .spawn()
            .context("cohort export")?;
        let export = Self(child);
        let begin = Instant::now();
        while scrape().is_err() {
            ensure!(
                begin.elapsed() < Duration::from_secs(20),
                "it does not answer"
            );
            std::thread::sleep(PAUSE);
        }
        Ok(export)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> Result<()> {
    raise_open_files().context("more files than that cannot be open")?;
    // Each page is written anew, as on a host.
    let export = Export::start(2 * SCRAPES + 1)?;
    measure_times("alone")?;
    let hostile = Hostile::begin();
    measure_times(&format!("beside {HOSTILE} hostile clients"))?;
    drop(export);
    // A recording is kept in memory, and a host's windows are not.
    let export = Export::start(2)?;
    measure_memory(&export)?;
    hostile.end()
}

/// Scrapes, and prints and checks how long it takes.
fn measure_times(how: &str) -> Result<()> {
    let mut times_ms = Vec::new();
    let mut bytes = 0;
    for _ in 0..SCRAPES {
        std::thread::sleep(PAUSE);
        let begin = Instant::now();
        bytes = scrape()?;
        times_ms.push(begin.elapsed().as_secs_f64() * 1000.0);
    }
    times_ms.sort_by(f64::total_cmp);
    let (median_ms, worst_ms) = (times_ms[SCRAPES / 2], times_ms[SCRAPES - 1]);
    println!(
        "{VMS} VMs, {SCRAPES} scrapes of {:.1} MiB, {how}: median {median_ms:.1} ms, worst {worst_ms:.1} ms",
        bytes as f64 / f64::from(1 << 20)
    );
    ensure!(median_ms <= MOST_MS, "more than {MOST_MS} ms");
    Ok(())
}

/// Scrapes, and prints and checks how much memory that takes.
fn measure_memory(export: &Export) -> Result<()> {
    for _ in 0..SCRAPES {
        std::thread::sleep(PAUSE);
        scrape()?;
    }
    let peak_mib = peak_mib(export.0.id())?;
    println!("memory, beside {HOSTILE} hostile clients: {peak_mib:.1} MiB at most");
    ensure!(peak_mib <= MOST_MIB, "more than {MOST_MIB} MiB");
    Ok(())
}

/// Clients that come again whenever they are let go, until it ends.
struct Hostile {
    end: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Hostile {
    fn begin() -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let told_to_end = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            let mut clients: Vec<Option<TcpStream>> = (0..HOSTILE).map(attack).collect();
            let mut attacks = HOSTILE;
            while !told_to_end.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(100));
                for (number, client) in clients.iter_mut().enumerate() {
                    // A byte each now and then, as of a header that never ends; nothing is read.
                    let is_open = client
                        .as_mut()
                        .is_some_and(|client| number % 4 != 1 || client.write_all(b"x").is_ok());
                    if !is_open || has_ended(client.as_ref()) {
                        *client = attack(number);
                        attacks += 1;
                    }
                }
            }
            attacks
        });
        Self { end, thread }
    }

    fn end(self) -> Result<()> {
        self.end.store(true, Ordering::Relaxed);
        let attacks = self.thread.join().ok().context("the clients failed")?;
        println!("{attacks} connections of hostile clients");
        Ok(())
    }
}

/// Whether the server closed it; what it sent meanwhile stays unread.
fn has_ended(client: Option<&TcpStream>) -> bool {
    client.is_none_or(|client| client.peek(&mut [0]).is_ok_and(|bytes| bytes == 0))
}

/// One of four: silent, one whose header never ends, one that reads no answer, one that talks nonsense.
fn attack(number: usize) -> Option<TcpStream> {
    let mut client = TcpStream::connect(ADDRESS).ok()?;
    client.set_nonblocking(true).ok()?;
    let request: &[u8] = match number % 4 {
        0 => b"",
        1 => b"GET /metrics HTTP/1.1\r\nX: ",
        2 => b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        _ => b"\0\xff\r\n\r\n",
    };
    client.write_all(request).ok()?;
    Some(client)
}

/// A window of a second in which each VM did something of everything.
fn window() -> HostView {
    let vcpu = VcpuView {
        vcpus: 1,
        run_pct: 41.3,
        ready_pct: 17.9,
        halted_pct: 40.8,
        entitled_pct: 44.4,
        spin_exits: 1234,
        yields_offered: 321,
        yields_served: 200,
        ipis: 4321,
        ipi_to_run: (0..24).collect(),
        ready_us: (0..24).rev().collect(),
        wakeups: 999,
        migrations: 77,
        ..VcpuView::default()
    };
    let taker = |kind: &str| TakerView {
        kind: kind.to_owned(),
        times: 5,
        ready_us: 12_345,
        ..TakerView::default()
    };
    let vm = |number: u32| {
        let mut vm = VmView {
            name: format!("instance-{number:08x}"),
            all: VcpuView {
                vcpus: VCPUS,
                ..vcpu.clone()
            },
            vcpus: (0..VCPUS).map(|number| (number, vcpu.clone())).collect(),
            takers: ["vm", "cgroup", "kernel"].map(taker).to_vec(),
            ..VmView::default()
        };
        vm.identity.name.clone_from(&vm.name);
        vm.identity.id = format!("6a4e3a0e-2f43-4b0a-9d63-6f0a{number:08x}");
        vm
    };
    HostView {
        window_ms: 1000,
        cpus: 128,
        scheduler: String::from("stock"),
        vms: (1..=VMS).map(|number| (number, vm(number))).collect(),
        ..HostView::default()
    }
}

/// Bytes of what Prometheus gets.
fn scrape() -> Result<usize> {
    let mut stream = TcpStream::connect(ADDRESS)?;
    let request = "GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\
                   Accept: application/openmetrics-text; version=1.0.0\r\n\r\n";
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(
        answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"# EOF\n"),
        "it is not answered in full"
    );
    Ok(answer.len())
}

/// The most memory that a process has used.
fn peak_mib(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kib.context("status has VmHWM")?.parse::<f64>()? / 1024.0)
}
