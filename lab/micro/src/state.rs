// SPDX-License-Identifier: GPL-2.0-only
//! Reads the state file of a running guest, and sets its flags. The file's layout is in [`crate::layout`].

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use anyhow::{Context, Result, bail, ensure};
use memmap2::{MmapOptions, MmapRaw};
use serde::{Deserialize, Serialize};

use crate::Histogram;
use crate::layout::{
    self, Header, LATENCY_BUCKETS, Latency, MAGIC, MAX_VCPUS, Shared, VERSION, Vcpu, Vector,
};
use crate::shared::{Kind, SharedTable};

/// The state file of a guest, mapped. Cheap to read, as often as wanted; the guest is not disturbed.
///
/// It stays readable after the guest has ended, with the last values.
pub struct State {
    map: MmapRaw,
    path: PathBuf,
    nr_vcpus: usize,
}

/// How far a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// It has not executed anything yet.
    Starting,
    /// Its program runs.
    Running,
    /// Its program is done, and it halts for good.
    Finished,
    /// The VMM has stopped it; the VMM's message says why.
    Failed,
}

/// A latency in TSC ticks of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyCounters {
    /// Number of samples.
    pub count: u64,
    /// Sum of all samples.
    pub sum: u64,
    /// Smallest sample, 0 if there is none.
    pub min: u64,
    /// Largest sample.
    pub max: u64,
    /// Bucket b counts samples of 2^b to 2^(b+1)-1 ticks, bucket 0 those of 0 as well; empty buckets at the end are
    /// left out.
    pub histogram: Vec<u64>,
}

/// The counters of one vCPU, as [`Vcpu`] describes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VcpuCounters {
    /// Passes through the program or its loop.
    pub progress: u64,
    /// Steps completed.
    pub steps: u64,
    /// Index of the step that runs or waits.
    pub step: u64,
    /// Iterations of completed `compute` steps.
    pub work: u64,
    /// PAUSE instructions executed.
    pub pauses: u64,
    /// Times that HLT was executed.
    pub halts: u64,
    /// Interrupts handled.
    pub interrupts: u64,
    /// IPIs sent.
    pub ipis_sent: u64,
    /// IPIs whose answer was waited for and seen.
    pub ipis_answered: u64,
    /// TSC of the last `stamp`.
    pub last_stamp: u64,
    /// TSC by slot of `stamp`.
    pub stamps: [u64; layout::STAMPS],
    /// How far the vCPU is.
    pub run_state: RunState,
    /// Thread that runs the vCPU.
    pub tid: i32,
    /// Exits to the VMM.
    pub user_exits: u64,
    /// From sending an IPI to its handler.
    pub delivery: LatencyCounters,
    /// From sending an IPI until the answer was seen.
    pub round_trip: LatencyCounters,
    /// Whether KVM tells the guest that the vCPU is preempted.
    pub preempted: bool,
}

impl State {
    /// Maps the state file of a guest that is ready, or has ended.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .with_context(|| {
                format!(
                    "{} cannot be opened: is the guest running, and was it started with --state?",
                    path.display()
                )
            })?;
        let not_state = || {
            format!(
                "{} is not a state file of this version of micro",
                path.display()
            )
        };
        let mut state = Self::map(&file, path.into()).with_context(not_state)?;
        state.check().with_context(not_state)?;
        Ok(state)
    }

    /// Makes an empty file the state file of a guest with these vCPUs and names.
    pub(crate) fn format(
        file: &File,
        path: PathBuf,
        name: &str,
        nr_vcpus: usize,
        shared: &SharedTable,
    ) -> Result<Self> {
        let size = layout::state_size(nr_vcpus);
        file.set_len(size as u64)
            .context("the state file cannot be extended; is its file system full?")?;
        let mut state = Self::map(file, path)?;
        state.nr_vcpus = nr_vcpus;
        state.write_names(name, shared);
        for index in 0..nr_vcpus {
            state.vcpu_ref(index).delivery.min.store(u64::MAX, Relaxed);
            state
                .vcpu_ref(index)
                .round_trip
                .min
                .store(u64::MAX, Relaxed);
        }
        let header = state.header();
        header.version.store(VERSION, Relaxed);
        header.nr_vcpus.store(nr_vcpus as u32, Relaxed);
        header.pid.store(std::process::id(), Relaxed);
        header
            .nr_shared
            .store(shared.objects().len() as u32, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(state)
    }

    fn map(file: &File, path: PathBuf) -> Result<Self> {
        let size = file
            .metadata()
            .context("the size of the state file is unknown")?
            .len() as usize;
        ensure!(size >= layout::state_size(1), "it has only {size} bytes");
        let map = MmapOptions::new()
            .len(size)
            .map_raw(file)
            .context("the state file cannot be mapped")?;
        Ok(Self {
            map,
            path,
            nr_vcpus: 0,
        })
    }

    fn check(&mut self) -> Result<()> {
        let header = self.header();
        ensure!(
            header.magic.load(Acquire) == MAGIC,
            "it does not begin as a state file does"
        );
        let version = header.version.load(Relaxed);
        ensure!(
            version == VERSION,
            "its version is {version}, this program reads {VERSION}"
        );
        let nr_vcpus = header.nr_vcpus.load(Relaxed) as usize;
        let size = self.map.len();
        if !(1..=MAX_VCPUS).contains(&nr_vcpus) || size != layout::state_size(nr_vcpus) {
            bail!("its {size} bytes are not what {nr_vcpus} vCPUs need");
        }
        ensure!(
            header.nr_shared.load(Relaxed) as usize <= layout::SHARED_OBJECTS,
            "it has too many shared names"
        );
        self.nr_vcpus = nr_vcpus;
        Ok(())
    }

    fn write_names(&mut self, name: &str, shared: &SharedTable) {
        let base = self.map.as_mut_ptr();
        // SAFETY: the header and all shared objects lie within the map (map() checked its size), which nobody else
        // has seen yet; names are shorter than their fields (Spec and the parser see to it), so a zero follows them.
        unsafe {
            let field = &raw mut (*base.cast::<Header>()).name;
            std::ptr::copy_nonoverlapping(
                name.as_ptr(),
                field.cast(),
                name.len().min(layout::NAME_BYTES - 1),
            );
            for (index, object) in shared.objects().iter().enumerate() {
                let place = base.add(layout::shared_offset(index)).cast::<Shared>();
                let field = &raw mut (*place).name;
                let bytes = object.name.len().min(layout::SHARED_NAME_BYTES - 1);
                std::ptr::copy_nonoverlapping(object.name.as_ptr(), field.cast(), bytes);
                (*place).kind.store(object.kind as u32, Relaxed);
                (*place).participants.store(object.participants, Relaxed);
            }
        }
    }

    /// The memory itself, for the VMM.
    pub(crate) fn memory(&self) -> &MmapRaw {
        &self.map
    }

    /// A reference to a `T` of [`layout`] within the map.
    fn at<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.map.len());
        // SAFETY: it lies within the map and is aligned (layout asserts it by sizes); any bytes are a valid T; T has
        // atomics only, and names that do not change after format().
        unsafe { &*self.map.as_ptr().add(offset).cast() }
    }

    pub(crate) fn header(&self) -> &Header {
        self.at(0)
    }

    pub(crate) fn vcpu_ref(&self, vcpu: usize) -> &Vcpu {
        assert!(
            vcpu < self.nr_vcpus,
            "vCPU {vcpu} of {} is asked for",
            self.nr_vcpus
        );
        self.at(layout::vcpu_offset(vcpu))
    }

    fn shared_ref(&self, name: &str) -> Option<&Shared> {
        let count = self.header().nr_shared.load(Relaxed) as usize;
        (0..count)
            .map(|index| self.at::<Shared>(layout::shared_offset(index)))
            .find(|object| text(&object.name) == name)
    }

    /// Where the state file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The guest's name.
    pub fn name(&self) -> String {
        text(&self.header().name).into_owned()
    }

    /// Number of vCPUs, those without a program included.
    pub fn nr_vcpus(&self) -> usize {
        self.nr_vcpus
    }

    /// Process id of the VMM.
    pub fn pid(&self) -> i32 {
        self.header().pid.load(Relaxed) as i32
    }

    /// TSC ticks of the guest per millisecond.
    pub fn tsc_khz(&self) -> u64 {
        self.header().tsc_khz.load(Relaxed)
    }

    /// Iterations of `compute` per millisecond; 0 if no program needed it.
    pub fn iterations_per_ms(&self) -> u64 {
        self.header().iterations_per_ms.load(Relaxed)
    }

    /// The counters of one vCPU. Each is right at the time it is read; together they are not a snapshot.
    ///
    /// # Panics
    /// If the guest has no such vCPU.
    pub fn vcpu(&self, vcpu: usize) -> VcpuCounters {
        let counters = self.vcpu_ref(vcpu);
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        VcpuCounters {
            progress: read(&counters.progress),
            steps: read(&counters.steps),
            step: read(&counters.step),
            work: read(&counters.work),
            pauses: read(&counters.pauses),
            halts: read(&counters.halts),
            interrupts: read(&counters.interrupts),
            ipis_sent: read(&counters.ipis_sent),
            ipis_answered: read(&counters.ipis_answered),
            last_stamp: read(&counters.last_stamp),
            stamps: std::array::from_fn(|slot| read(&counters.stamps[slot])),
            run_state: RunState::from_word(read(&counters.run_state)),
            tid: read(&counters.tid) as i32,
            user_exits: read(&counters.user_exits),
            delivery: LatencyCounters::read(&counters.delivery),
            round_trip: LatencyCounters::read(&counters.round_trip),
            preempted: counters.steal_time.preempted.load(Acquire) != 0,
        }
    }

    /// The counters of all vCPUs.
    pub fn vcpus(&self) -> impl Iterator<Item = VcpuCounters> + '_ {
        (0..self.nr_vcpus).map(|vcpu| self.vcpu(vcpu))
    }

    /// How late the steps `sleep` of all vCPUs went on after their time, TSC ticks of the guest.
    pub fn wakeups(&self) -> Histogram {
        let vcpus = (0..self.nr_vcpus).map(|vcpu| &self.vcpu_ref(vcpu).wakeups.histogram);
        vcpus.fold(Histogram::default(), |mut sum, buckets| {
            sum.add_counts(buckets.iter().map(|bucket| bucket.load(Relaxed)));
            sum
        })
    }

    /// The sum of all vCPUs' progress: the guest's throughput is its change by time.
    pub fn progress(&self) -> u64 {
        (0..self.nr_vcpus)
            .map(|vcpu| self.vcpu_ref(vcpu).progress.load(Relaxed))
            .sum()
    }

    /// Interrupts of a vector that a vCPU has handled, and the guest's TSC at the entry of the last handler.
    ///
    /// # Panics
    /// If the guest has no such vCPU.
    pub fn received(&self, vcpu: usize, vector: u8) -> (u64, u64) {
        assert!(
            vcpu < self.nr_vcpus,
            "vCPU {vcpu} of {} is asked for",
            self.nr_vcpus
        );
        let entry: &Vector = self.at(layout::vcpu_offset(vcpu) + layout::vector_offset(vector));
        let count = entry.count.load(Acquire);
        (count, entry.last_tsc.load(Relaxed))
    }

    /// The value of a flag; of a lock, how often it was given; of a barrier, how often it was passed. None if no
    /// program names it.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.shared_ref(name)
            .map(|object| object.value.load(Acquire))
    }

    /// Sets a flag that programs `spin` for: how a test starts or paces its guests.
    pub fn set_flag(&self, name: &str, value: u64) -> Result<()> {
        let Some(object) = self.shared_ref(name) else {
            bail!(
                "no program of the guest {} names a flag `{name}`",
                self.name()
            );
        };
        ensure!(
            object.kind.load(Relaxed) == Kind::Flag as u32,
            "`{name}` of the guest {} is no flag: only flags can be set from outside",
            self.name()
        );
        object.value.store(value, Release);
        Ok(())
    }
}

impl RunState {
    /// The word that stands for it in the state file.
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Self::Starting => 0,
            Self::Running => 1,
            Self::Finished => 2,
            Self::Failed => 3,
        }
    }

    fn from_word(word: u64) -> Self {
        match word {
            0 => Self::Starting,
            1 => Self::Running,
            2 => Self::Finished,
            _ => Self::Failed,
        }
    }
}

impl LatencyCounters {
    /// No samples.
    pub fn none() -> Self {
        Self {
            count: 0,
            sum: 0,
            min: 0,
            max: 0,
            histogram: Vec::new(),
        }
    }

    fn read(latency: &Latency) -> Self {
        let count = latency.count.load(Relaxed);
        let mut histogram: Vec<_> = latency
            .histogram
            .iter()
            .map(|bucket| bucket.load(Relaxed))
            .collect();
        histogram.truncate(
            histogram
                .iter()
                .rposition(|count| *count != 0)
                .map_or(0, |last| last + 1),
        );
        Self {
            count,
            sum: latency.sum.load(Relaxed),
            min: if count == 0 {
                0
            } else {
                latency.min.load(Relaxed)
            },
            max: latency.max.load(Relaxed),
            histogram,
        }
    }

    /// Adds the samples of `other`.
    pub fn add(&mut self, other: &Self) {
        self.min = match (self.count, other.count) {
            (_, 0) => self.min,
            (0, _) => other.min,
            _ => self.min.min(other.min),
        };
        self.max = self.max.max(other.max);
        self.count += other.count;
        self.sum = self.sum.wrapping_add(other.sum);
        self.histogram
            .resize(self.histogram.len().max(other.histogram.len()), 0);
        for (bucket, count) in self.histogram.iter_mut().zip(&other.histogram) {
            *bucket += count;
        }
    }

    /// Mean in ticks; none without samples.
    pub fn mean(&self) -> Option<f64> {
        (self.count != 0).then(|| self.sum as f64 / self.count as f64)
    }
}

/// A zero-terminated name.
fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default())
}

const _: () = assert!(LATENCY_BUCKETS == u64::BITS as usize);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;

    fn file_of(texts: &[&str]) -> (tempfile::NamedTempFile, State) {
        let programs: Vec<Program> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let shared = SharedTable::collect(&programs).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let state = State::format(
            file.as_file(),
            file.path().into(),
            "guest",
            programs.len(),
            &shared,
        )
        .unwrap();
        (file, state)
    }

    #[test]
    fn what_is_written_is_read_by_another_mapping() {
        let (file, state) = file_of(&["loop: spin go", "add count; barrier"]);
        let reader = State::open(file.path()).unwrap();
        assert_eq!((reader.name().as_str(), reader.nr_vcpus()), ("guest", 2));
        assert_eq!(reader.pid(), std::process::id() as i32);
        state.vcpu_ref(1).progress.store(7, Relaxed);
        assert_eq!(
            (
                reader.vcpu(0).progress,
                reader.vcpu(1).progress,
                reader.progress()
            ),
            (0, 7, 7)
        );
        assert_eq!(reader.vcpu(1).run_state, RunState::Starting);
        assert_eq!(reader.vcpu(1).round_trip, LatencyCounters::none());
    }

    #[test]
    fn flags_are_set_from_outside_and_other_objects_are_not() {
        let (file, state) = file_of(&["loop: spin go; barrier"]);
        let reader = State::open(file.path()).unwrap();
        reader.set_flag("go", 5).unwrap();
        assert_eq!(state.value("go"), Some(5));
        assert_eq!(state.value("stop"), None);
        assert!(
            reader
                .set_flag("stop", 1)
                .unwrap_err()
                .to_string()
                .contains("names a flag `stop`")
        );
        assert!(
            reader
                .set_flag("barrier", 1)
                .unwrap_err()
                .to_string()
                .contains("is no flag")
        );
    }

    #[test]
    fn other_files_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let refusal = |file: &tempfile::NamedTempFile| {
            format!("{:#}", State::open(file.path()).err().unwrap())
        };
        assert!(refusal(&file).contains("only 0 bytes"));
        file.as_file()
            .set_len(layout::state_size(1) as u64)
            .unwrap();
        assert!(refusal(&file).contains("does not begin as a state file does"));
        let (file, state) = file_of(&["halt"]);
        state.header().version.store(VERSION + 1, Relaxed);
        assert!(refusal(&file).contains(&format!("its version is {}", VERSION + 1)));
        state.header().version.store(VERSION, Relaxed);
        state.header().nr_vcpus.store(2, Relaxed);
        assert!(refusal(&file).contains("not what 2 vCPUs need"));
    }

    #[test]
    fn latencies_add_up() {
        let mut sum = LatencyCounters::none();
        sum.add(&LatencyCounters {
            count: 2,
            sum: 10,
            min: 4,
            max: 6,
            histogram: vec![0, 0, 2],
        });
        sum.add(&LatencyCounters::none());
        sum.add(&LatencyCounters {
            count: 1,
            sum: 1,
            min: 1,
            max: 1,
            histogram: vec![1],
        });
        assert_eq!(
            sum,
            LatencyCounters {
                count: 3,
                sum: 11,
                min: 1,
                max: 6,
                histogram: vec![1, 0, 2]
            }
        );
        assert_eq!(sum.mean(), Some(11.0 / 3.0));
        assert_eq!(LatencyCounters::none().mean(), None);
    }
}
