// SPDX-License-Identifier: GPL-2.0-only
//! What a booted guest consists of: the initrd with its workloads, and the layout of the page in which they
//! count. Not here: starting guests and reading their counters (`inside::booted`).
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cpio::newc::{self, Builder};

use crate::outside::modules::LOAD_ORDER;

/// The static program with all workloads, built from `lab/guest/*.c`.
pub const WORKLOAD_PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/workload"));
const INIT_SCRIPT: &[u8] = include_bytes!("../guest/init");

/// Our own workloads: `lab/guest/*.c`.
pub const OWN_WORKLOADS: [&str; 10] = [
    "tlb", "spin", "pipe", "barrier", "busy", "rcu", "latency", "fork", "mapping", "stolen",
];
/// Real workloads: programs of the guests' image, run by the scripts of the same names in `lab/guest/real`.
pub const REAL_WORKLOADS: [&str; 8] = [
    "redis", "postgres", "dbench", "vips", "restic", "pbzip2", "sysbench", "make",
];
/// What the guests' initrd has in /real.
const REAL_SCRIPTS: [(&str, &[u8]); 10] = [
    ("enter", include_bytes!("../guest/real/enter")),
    ("run", include_bytes!("../guest/real/run")),
    ("redis", include_bytes!("../guest/real/redis")),
    ("postgres", include_bytes!("../guest/real/postgres")),
    ("dbench", include_bytes!("../guest/real/dbench")),
    ("vips", include_bytes!("../guest/real/vips")),
    ("restic", include_bytes!("../guest/real/restic")),
    ("pbzip2", include_bytes!("../guest/real/pbzip2")),
    ("sysbench", include_bytes!("../guest/real/sysbench")),
    ("make", include_bytes!("../guest/real/make")),
];

/// "COHORTOP": the first word of a counter page; `COUNTER_MAGIC` in `lab/guest/workload.h`.
pub const COUNTER_MAGIC: u64 = 0x504f_5452_4f48_4f43;
/// Size of the counter page in bytes.
pub const COUNTER_PAGE_BYTES: usize = 4096;
/// Distance of two threads' counters in the page, and the place of the first, in bytes.
pub const COUNTER_SLOT_BYTES: usize = 64;
/// Number of threads that a counter page has room for.
pub const COUNTER_SLOTS: usize = 31;
/// Place of the histogram of latencies (ns) in the page, in bytes; its buckets are those of `cohort_micro::Histogram`.
pub const LATENCIES_OFFSET: usize = (COUNTER_SLOTS + 1) * COUNTER_SLOT_BYTES;
/// Number of its buckets, of eight bytes each.
pub const LATENCY_BUCKETS: usize = (COUNTER_PAGE_BYTES - LATENCIES_OFFSET) / 8;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Writes the guests' initrd (an uncompressed cpio archive) to `initrd`. `busybox` is a statically linked
/// busybox. `modules` is a folder with the unpacked modules by which L1 reaches its root, and their `load-order`; by
/// the same ones guests reach the guests' image, so they are needed only with it. The file appears complete or not at
/// all.
///
/// # Errors
/// When `busybox` or the modules cannot be read or `initrd` cannot be written.
pub fn build_initrd(busybox: &Path, modules: Option<&Path>, initrd: &Path) -> Result<()> {
    let busybox_program = fs::read(busybox).with_context(|| {
        format!(
            "The static busybox {} for guests cannot be read",
            busybox.display()
        )
    })?;
    let modules = modules.map(read_modules).transpose()?.unwrap_or_default();
    let unfinished = initrd.with_extension(format!("partial.{}", std::process::id()));
    write_archive(&unfinished, &busybox_program, &modules)
        .and_then(|()| fs::rename(&unfinished, initrd))
        .inspect_err(|_| {
            // The first error is the one to report; what is left of the file may not even exist.
            let _ = fs::remove_file(&unfinished);
        })
        .with_context(|| format!("The guests' initrd {} cannot be written", initrd.display()))
}

/// The names and contents of `load-order` and the modules that it lists.
fn read_modules(folder: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let read = |name: &str| {
        let path = folder.join(name);
        let content = fs::read(&path)
            .with_context(|| format!("{} for guests cannot be read", path.display()))?;
        Ok((name.to_owned(), content))
    };
    let order = read(LOAD_ORDER)?;
    let names = String::from_utf8_lossy(&order.1).into_owned();
    std::iter::once(Ok(order))
        .chain(names.lines().map(read))
        .collect()
}

fn write_archive(path: &Path, busybox: &[u8], modules: &[(String, Vec<u8>)]) -> io::Result<()> {
    let mut archive = File::create(path)?;
    for directory in ["bin", "dev", "modules", "proc", "real", "sys", "tmp"] {
        add_entry(&mut archive, Builder::new(directory).mode(DIRECTORY), &[])?;
    }
    // The kernel opens /dev/console for init before init can mount anything.
    add_entry(
        &mut archive,
        Builder::new("dev/console")
            .mode(CHARACTER_DEVICE)
            .rdev_major(5)
            .rdev_minor(1),
        &[],
    )?;
    add_entry(
        &mut archive,
        Builder::new("bin/busybox").mode(PROGRAM),
        busybox,
    )?;
    add_entry(
        &mut archive,
        Builder::new("bin/workload").mode(PROGRAM),
        WORKLOAD_PROGRAM,
    )?;
    add_entry(
        &mut archive,
        Builder::new("init").mode(PROGRAM),
        INIT_SCRIPT,
    )?;
    for (name, script) in REAL_SCRIPTS {
        let path = format!("real/{name}");
        add_entry(&mut archive, Builder::new(&path).mode(PROGRAM), script)?;
    }
    for (name, module) in modules {
        let path = format!("modules/{name}");
        add_entry(&mut archive, Builder::new(&path).mode(PROGRAM), module)?;
    }
    newc::trailer(&mut archive)?;
    archive.sync_all()
}

fn add_entry(archive: &mut File, entry: Builder, content: &[u8]) -> io::Result<()> {
    let size = u32::try_from(content.len()).map_err(io::Error::other)?;
    let mut writer = entry.write(archive, size);
    writer.write_all(content)?;
    writer.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use super::*;

    /// A workload that runs on this machine and counts in a file; killed when dropped.
    struct NativeWorkload {
        process: Child,
        directory: tempfile::TempDir,
    }

    impl NativeWorkload {
        fn start(options: &[&str]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let program = directory.path().join("workload");
            fs::write(&program, WORKLOAD_PROGRAM).unwrap();
            // By way of a shell: another test's fork may hold the fresh file open for writing, and executing
            // it would fail with ETXTBSY; ld.so is no way either, the program is static.
            let command = format!(
                "chmod +x {0} && exec {0} {1} work=10000 counters_file={0}.counters",
                program.display(),
                options.join(" ")
            );
            let process = Command::new("sh")
                .args(["-c", &command])
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            Self { process, directory }
        }

        fn word(&self, offset: usize) -> Option<u64> {
            let page = fs::read(self.directory.path().join("workload.counters")).ok()?;
            Some(u64::from_le_bytes(
                page.get(offset..offset + 8)?.try_into().ok()?,
            ))
        }
    }

    impl Drop for NativeWorkload {
        fn drop(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    fn names_in(archive: &Path) -> Vec<String> {
        let mut names = Vec::new();
        let mut archive = File::open(archive).unwrap();
        loop {
            let reader = newc::Reader::new(archive).unwrap();
            if reader.entry().is_trailer() {
                return names;
            }
            names.push(reader.entry().name().to_owned());
            archive = reader.finish().unwrap();
        }
    }

    fn within_ten_seconds(condition: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !condition() {
            if start.elapsed() > Duration::from_secs(10) {
                return false;
            }
            sleep(Duration::from_millis(10));
        }
        true
    }

    #[test]
    fn every_thread_of_every_workload_counts_in_its_own_slot() {
        for options in [
            &["tlb"][..],
            &["spin"],
            &["pipe"],
            &["barrier"],
            &["barrier", "policy=sleep"],
            &["busy"],
            &["latency"],
            &["fork"],
        ] {
            let workload = NativeWorkload::start(&[options, &["threads=3"]].concat());
            for slot in 1..=3 {
                assert!(
                    within_ten_seconds(|| workload.word(slot * COUNTER_SLOT_BYTES) > Some(10)),
                    "{options:?}: thread {slot} of 3 does not count"
                );
            }
            assert_eq!(workload.word(0), Some(COUNTER_MAGIC));
            assert_eq!(workload.word(8), Some(3));
            assert_eq!(workload.word(4 * COUNTER_SLOT_BYTES), Some(0));
        }
    }

    #[test]
    fn a_spinning_barrier_keeps_its_threads_together() {
        let workload = NativeWorkload::start(&["barrier", "threads=2"]);
        assert!(within_ten_seconds(
            || workload.word(COUNTER_SLOT_BYTES) > Some(1000)
        ));
        let page = fs::read(workload.directory.path().join("workload.counters")).unwrap();
        let count = |slot: usize| {
            let offset = slot * COUNTER_SLOT_BYTES;
            u64::from_le_bytes(page[offset..offset + 8].try_into().unwrap())
        };
        // The two words are not read at the same instant, so a few rounds may pass between them.
        assert!(
            count(1).abs_diff(count(2)) <= 100,
            "{} and {} meetings",
            count(1),
            count(2)
        );
    }

    #[test]
    fn latencies_are_counted_in_the_buckets_that_the_host_reads() {
        let workload = NativeWorkload::start(&["latency", "threads=1"]);
        let page = || fs::read(workload.directory.path().join("workload.counters")).unwrap();
        assert!(within_ten_seconds(
            || workload.word(COUNTER_SLOT_BYTES) > Some(20)
        ));
        let latencies = crate::inside::booted::latencies_in(&page());
        assert!(latencies.len() >= 20);
        let median_ns = latencies.quantile(0.5).unwrap();
        assert!(
            (100.0..1e9).contains(&median_ns),
            "a wake-up takes {median_ns} ns"
        );
    }

    #[test]
    fn the_work_of_a_millisecond_is_a_number() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("workload");
        fs::write(&program, WORKLOAD_PROGRAM).unwrap();
        let script = format!("chmod +x {0} && exec {0} calibrate", program.display());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.trim().parse::<u64>().unwrap() > 100, "{text}");
    }

    #[test]
    fn an_unknown_option_ends_the_workload_with_a_sentence() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("workload");
        fs::write(&program, WORKLOAD_PROGRAM).unwrap();
        let script = format!("chmod +x {0} && exec {0} spin wrk=1", program.display());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(
            String::from_utf8(output.stderr)
                .unwrap()
                .contains("unknown option or value: wrk")
        );
    }

    #[test]
    fn the_initrd_holds_init_busybox_and_the_workloads() {
        let directory = tempfile::tempdir().unwrap();
        let busybox = directory.path().join("busybox");
        fs::write(&busybox, b"not really").unwrap();
        let initrd = directory.path().join("initrd");
        build_initrd(&busybox, None, &initrd).unwrap();
        let names = names_in(&initrd);
        assert_eq!(
            names[..11],
            [
                "bin",
                "dev",
                "modules",
                "proc",
                "real",
                "sys",
                "tmp",
                "dev/console",
                "bin/busybox",
                "bin/workload",
                "init"
            ]
        );
        for workload in REAL_WORKLOADS {
            let script = format!("real/{workload}");
            assert!(names.contains(&script), "no {script}");
        }
        assert_eq!(
            fs::read_dir(directory.path()).unwrap().count(),
            2,
            "a partial file is left behind"
        );
    }

    #[test]
    fn the_initrd_holds_the_modules_that_are_listed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("busybox"), b"not really").unwrap();
        fs::write(path(LOAD_ORDER), "erofs.ko\noverlay.ko\n").unwrap();
        for module in ["erofs.ko", "overlay.ko", "kvm.ko"] {
            fs::write(path(module), module).unwrap();
        }
        let build = || build_initrd(&path("busybox"), Some(directory.path()), &path("initrd"));
        build().unwrap();
        let names = names_in(&path("initrd"));
        assert_eq!(
            names[names.len() - 3..],
            [
                "modules/load-order",
                "modules/erofs.ko",
                "modules/overlay.ko"
            ]
        );
        fs::remove_file(path("erofs.ko")).unwrap();
        assert!(build().unwrap_err().to_string().contains("erofs.ko"));
    }

    #[test]
    fn files_that_are_written_count_the_operations_they_stand_for() {
        let folder = tempfile::tempdir().unwrap();
        let watched = format!("directory={}", folder.path().display());
        let workload = NativeWorkload::start(&["files", &watched, "threads=1", "operations=50"]);
        // The page is there before anything is watched; what is written before that would not count.
        assert!(within_ten_seconds(|| {
            fs::write(folder.path().join("first"), "x").unwrap();
            workload.word(COUNTER_SLOT_BYTES) >= Some(50)
        }));
        sleep(Duration::from_millis(100));
        let before = workload.word(COUNTER_SLOT_BYTES).unwrap();
        // By a process of its own: what other tests fork from this one keeps its files open for a moment, so that some are
        // closed twice in a row, of which the kernel makes one event.
        let written = Command::new("sh")
            .args([
                "-c",
                "for i in $(seq 500); do echo x > one; echo x > two; done",
            ])
            .current_dir(folder.path())
            .status()
            .unwrap();
        assert!(written.success());
        assert!(
            within_ten_seconds(|| workload.word(COUNTER_SLOT_BYTES).unwrap() == before + 1000 * 50),
            "1000 files made {:?} of {before}",
            workload.word(COUNTER_SLOT_BYTES)
        );
    }

    /// A client that asks in this protocol, and the server's end of its connection.
    fn asking(protocol: &str) -> (NativeWorkload, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let server = UnixListener::bind(&socket).unwrap();
        let file = format!("file={}", socket.display());
        let protocol = format!("protocol={protocol}");
        let workload = NativeWorkload::start(&["asks", &file, &protocol, "threads=1"]);
        (workload, server.accept().unwrap().0)
    }

    #[test]
    fn answers_are_counted_and_timed() {
        let (mut workload, mut client) = asking("redis");
        let mut request = [0; 9];
        // The client waits: it has asked once more than it was answered.
        for _ in 0..3 {
            client.read_exact(&mut request).unwrap();
            assert_eq!(&request, b"GET key\r\n");
            sleep(Duration::from_millis(20));
            // In two pieces, as it may come.
            client.write_all(b"$-").unwrap();
            client.write_all(b"1\r\n").unwrap();
        }
        client.read_exact(&mut request).unwrap();
        assert_eq!(workload.word(COUNTER_SLOT_BYTES), Some(3));
        let page = fs::read(workload.directory.path().join("workload.counters")).unwrap();
        let latencies = crate::inside::booted::latencies_in(&page);
        assert_eq!(latencies.len(), 3);
        assert!(latencies.quantile(0.5).unwrap() >= 15e6);
        // Another answer ends it, and with it a guest.
        client.write_all(b"-ERR\r\n").unwrap();
        assert!(!workload.process.wait().unwrap().success());
    }

    /// A message of postgres.
    fn message(letter: &[u8], content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(4 + content.len()).unwrap().to_be_bytes();
        [letter, &length, content].concat()
    }

    #[test]
    fn postgres_is_asked_as_its_own_clients_do() {
        let (mut workload, mut client) = asking("postgres");
        let greeting = message(b"", b"\0\x03\0\0user\0nobody\0database\0postgres\0\0");
        let mut said = vec![0; greeting.len()];
        client.read_exact(&mut said).unwrap();
        assert_eq!(said, greeting);
        let ready = message(b"Z", b"I");
        client
            .write_all(&[message(b"R", &[0; 4]), ready.clone()].concat())
            .unwrap();
        let read_request = |client: &mut UnixStream| {
            let mut head = [0; 5];
            client.read_exact(&mut head).unwrap();
            assert_eq!(head[0], b'Q');
            let length = u32::from_be_bytes(head[1..].try_into().unwrap());
            let mut text = vec![0; length as usize - 4];
            client.read_exact(&mut text).unwrap();
            assert!(text.starts_with(b"UPDATE pgbench_accounts") && text.ends_with(b")\0"));
        };
        // In two pieces, the first of which ends within a message, as it may come.
        let answer = [message(b"C", b"UPDATE 1\0"), ready].concat();
        let (first, rest) = answer.split_at(answer.len() - 3);
        read_request(&mut client);
        client.write_all(first).unwrap();
        sleep(Duration::from_millis(20));
        assert_eq!(workload.word(COUNTER_SLOT_BYTES), Some(0));
        client.write_all(rest).unwrap();
        read_request(&mut client);
        assert_eq!(workload.word(COUNTER_SLOT_BYTES), Some(1));
        // An error ends it, and with it a guest.
        client.write_all(&message(b"E", b"\0")).unwrap();
        assert!(!workload.process.wait().unwrap().success());
    }

    #[test]
    fn a_missing_busybox_is_an_error_that_names_it() {
        let error = build_initrd(
            Path::new("/nonexistent/busybox"),
            None,
            Path::new("/nonexistent/initrd"),
        )
        .unwrap_err();
        assert!(
            error.to_string().contains("/nonexistent/busybox"),
            "{error}"
        );
    }
}
