// SPDX-License-Identifier: GPL-2.0-only
//! What people and programs read of a window of time: the fields of `cohort watch --json`, of recordings, and behind the
//! columns of tables. How they come about is in `observation`.

use crate::host::vm_identity::VmIdentity;
use anyhow::Context;
use scx_stats_derive::{Stats, stat_doc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// How it is known how long a vCPU was halted.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum HaltedBy {
    /// Its HLT exits: KVM says.
    #[default]
    Exits,
    /// It halts on its CPU, whose MPERF says.
    Mperf,
    /// It halts on its CPU, and nobody knows for how long.
    Unseen,
}

impl HaltedBy {
    /// As it stands in JSON.
    pub fn word(self) -> &'static str {
        match self {
            HaltedBy::Exits => "exits",
            HaltedBy::Mperf => "mperf",
            HaltedBy::Unseen => "unseen",
        }
    }

    /// Whether a field can be had of a vCPU whose `halted_by` is `word`.
    pub fn shows(word: &str, field: &str) -> bool {
        field != "halted_pct" || word != HaltedBy::Unseen.word()
    }
}

/// One vCPU, or all vCPUs of a VM together, in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "what vCPUs did in the window")]
pub struct VcpuView {
    #[stat(desc = "vCPUs counted here")]
    pub vcpus: u32,
    #[stat(
        desc = "part of the time in which it ran, and was not halted, in percent of a CPU per vCPU"
    )]
    pub run_pct: f64,
    #[stat(desc = "part of the time in which it was runnable and waited for a CPU, in percent")]
    pub ready_pct: f64,
    #[stat(desc = "part of the time in which it was runnable and a cap stopped it, in percent")]
    pub limited_pct: f64,
    #[stat(desc = "part of the time in which the guest had nothing to do on it, in percent")]
    pub halted_pct: f64,
    #[stat(
        desc = "how halted_pct is known: exits (HLT exits, and KVM tells), mperf (HLT or MWAIT do not exit: the counter MPERF of its CPU stood still), or unseen; then halted_pct is left out, and halted time counts as run_pct"
    )]
    pub halted_by: String,
    #[stat(
        desc = "part of the time in which it had a CPU and MPERF could not be read, in percent; it counts as run_pct"
    )]
    pub halted_unread_pct: f64,
    #[stat(
        desc = "part of the time in which it had a CPU: run_pct, and what it was halted there, in percent of a CPU per vCPU"
    )]
    pub on_cpu_pct: f64,
    #[stat(desc = "part of the time in which its thread slept outside of the guest, in percent")]
    pub away_pct: f64,
    #[stat(
        desc = "part of the time in which KVM polled for work after a halt, in percent; it is a part of run_pct"
    )]
    pub poll_pct: f64,
    #[stat(
        desc = "part of the time in which KVM looked whom to run in its place, because it spins, in percent; it is a part of run_pct"
    )]
    pub spin_pct: f64,
    #[stat(
        desc = "CPU time it was entitled to, given its cgroups and what all asked for, in percent of a CPU per vCPU"
    )]
    pub entitled_pct: f64,
    #[stat(desc = "times it left the guest because it spins")]
    pub spin_exits: u64,
    #[stat(desc = "directed yields: times KVM offered a sibling in its place")]
    pub yields_offered: u64,
    #[stat(desc = "of yields_offered: the sibling ran next")]
    pub yields_served: u64,
    #[stat(desc = "of yields_offered: not served, as the sibling ran already, or slept")]
    pub yields_not_ready: u64,
    #[stat(
        desc = "of yields_offered: the scheduler declined, though the sibling waited for a CPU; what is left was accepted, but another thread ran next"
    )]
    pub yields_refused: u64,
    #[stat(desc = "fixed IPIs that it sent to one sibling")]
    pub ipis: u64,
    #[stat(desc = "IPIs to it while it waited for a CPU, until it ran: less than 2^i us")]
    pub ipi_to_run: Vec<u64>,
    #[stat(desc = "the sum of the times that ipi_to_run counts, in microseconds")]
    pub ipi_to_run_us: u64,
    #[stat(
        desc = "the longest time that ipi_to_run counts since the command was started, in microseconds"
    )]
    pub longest_ipi_us: u64,
    #[stat(desc = "waits for a CPU: less than 2^i us")]
    pub ready_us: Vec<u64>,
    #[stat(desc = "longest wait for a CPU since the command was started, in microseconds")]
    pub longest_ready_us: u64,
    #[stat(desc = "times it woke up")]
    pub wakeups: u64,
    #[stat(desc = "times it started on another CPU than it last ran on")]
    pub migrations: u64,
    #[stat(desc = "of the migrations: to a CPU with another last-level cache")]
    pub migrations_far: u64,
    #[stat(desc = "times it was preempted in guest user mode, or outside of the guest")]
    pub preempted_user: u64,
    #[stat(desc = "times it was preempted in guest kernel mode")]
    pub preempted_kernel: u64,
    #[stat(
        desc = "part of its ready time in which it waited behind a sibling while another CPU that it may use ran none, in percent"
    )]
    pub stacked_pct: f64,
    #[stat(
        desc = "the longest stretch without a CPU, though it was not halted, that ended in the window or went on at its end"
    )]
    pub longest_off_cpu: OffCpuView,
}

/// The longest stretch of time in which a vCPU, though it was not halted, had no CPU.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "a stretch in which a vCPU had no CPU")]
pub struct OffCpuView {
    #[stat(
        desc = "its length from its beginning, which may lie before the window, in microseconds"
    )]
    pub us: u64,
    #[stat(desc = "part of us in which it waited for a CPU")]
    pub ready_us: u64,
    #[stat(
        desc = "part of us in which a cap stopped it; beside this and ready_us, its thread slept outside of the guest"
    )]
    pub limited_us: u64,
    #[stat(desc = "when it ended, or was seen to go on, in milliseconds since 1970 (UTC)")]
    pub until_ms: u64,
    #[stat(desc = "1 if it went on, 0 if it had ended")]
    pub goes_on: u32,
    #[stat(
        desc = "how its thread slept: in-kvm (inside KVM_RUN), page (of its memory has to come), stopped (by a signal), frozen, io, memory, uninterruptible, told (until another thread says so); several, or none"
    )]
    pub sleep: Vec<String>,
    #[stat(desc = "number of the system call in which its thread slept; -1 for none")]
    pub syscall: i64,
    #[stat(
        desc = "who had its CPU first; who had it last, if that was for most of the stretch, or if the vCPU woke up in it: name of the VM, path of the cgroup, or kernel threads; empty if not known"
    )]
    pub taker: String,
    #[stat(desc = "name of the thread that had its CPU then")]
    pub taker_thread: String,
}

impl OffCpuView {
    /// Of it, the thread slept outside of the guest.
    pub fn slept_us(&self) -> u64 {
        self.us.saturating_sub(self.ready_us + self.limited_us)
    }

    /// Whether `sleep` has `word`.
    pub fn slept(&self, word: &str) -> bool {
        self.sleep.iter().any(|how| how == word)
    }
}

/// The kernel's pressure stall information of the host in one window.
#[stat_doc]
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "part of the time in which tasks of this host stood still for want of something")]
pub struct PressureView {
    #[stat(desc = "some task waited for a CPU, in percent of the time")]
    pub cpu_some_pct: f64,
    #[stat(desc = "some task waited for I/O, in percent of the time")]
    pub io_some_pct: f64,
    #[stat(desc = "all tasks that were not idle waited for I/O, in percent of the time")]
    pub io_full_pct: f64,
    #[stat(desc = "some task waited for memory, in percent of the time")]
    pub memory_some_pct: f64,
    #[stat(desc = "all tasks that were not idle waited for memory, in percent of the time")]
    pub memory_full_pct: f64,
}

/// Who took CPUs from a VM in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "who took a CPU from a VM in the window")]
pub struct TakerView {
    #[stat(desc = "vm, cgroup or kernel")]
    pub kind: String,
    #[stat(desc = "number of the VM's process, id of the cgroup, or 0 for the kernel")]
    pub id: u64,
    #[stat(desc = "name of the VM, path of the cgroup, or kernel threads")]
    pub name: String,
    #[stat(desc = "how often they took a CPU")]
    pub times: u64,
    #[stat(desc = "how long the VM's vCPUs waited then, in microseconds")]
    pub ready_us: u64,
}

/// One VM in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "one VM in the window")]
pub struct VmView {
    #[stat(desc = "name, with the process where several VMs have the same")]
    pub name: String,
    #[stat(desc = "whose VM it is")]
    pub identity: VmIdentity,
    #[stat(desc = "all its vCPUs together")]
    pub all: VcpuView,
    #[stat(desc = "each vCPU, by its number in the VM")]
    pub vcpus: BTreeMap<u32, VcpuView>,
    #[stat(desc = "who took CPUs from it, the most time first")]
    pub takers: Vec<TakerView>,
}

/// The host in one window of time.
#[stat_doc]
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize, Stats)]
#[serde(default)]
#[stat(desc = "the host in the window", top)]
pub struct HostView {
    #[stat(desc = "length of the window, in milliseconds")]
    pub window_ms: u64,
    #[stat(desc = "its end, in milliseconds since 1970 (UTC); 0 if not known")]
    pub ended_ms: u64,
    #[stat(desc = "what schedules the host: a sched_ext scheduler, or stock")]
    pub scheduler: String,
    #[stat(desc = "CPUs online at its end")]
    pub cpus: u32,
    #[stat(desc = "what KVM does and is not seen here, in words")]
    pub blind_spots: Vec<String>,
    #[stat(desc = "fields that are left out, as blind_spots says")]
    pub unseen: Vec<String>,
    #[stat(desc = "vCPUs for each CPU that is online")]
    pub overcommitment: f64,
    #[stat(
        desc = "part of the time in which vCPUs had CPUs that was neither halt polling nor KVM's search for a vCPU to run in place of one that spins, in percent; what guests spin before they are stopped is not seen"
    )]
    pub efficiency_pct: f64,
    #[stat(
        desc = "how much halted_pct may be wrong where halted_by is mperf, in percent of the time in which a vCPU was not halted"
    )]
    pub halted_error_pct: f64,
    #[stat(desc = "the kernel's pressure stall information of the whole host")]
    pub pressure: PressureView,
    #[stat(desc = "VMs by process")]
    pub vms: BTreeMap<u32, VmView>,
}

impl VmView {
    /// Whether people who say `name` mean this VM, which process `tgid` runs: its name in tables, metrics or for its manager,
    /// the number or UUID that this has for it, or the process.
    pub fn is_called(&self, tgid: u32, name: &str) -> bool {
        let identity = &self.identity;
        name == self.name
            || name == identity.name
            || name == identity.id
            || name == identity.shown()
            || name == identity.lasting(tgid)
            || name == tgid.to_string()
    }
}

impl VcpuView {
    /// Whether a field that its host has can be had of it.
    pub fn has(&self, field: &str) -> bool {
        HaltedBy::shows(&self.halted_by, field)
    }
}

impl HostView {
    /// Whether a field, of the host or of a vCPU, can be had here.
    pub fn has(&self, field: &str) -> bool {
        !self.unseen.iter().any(|unseen| unseen == field)
    }

    /// Of the vCPUs' running time, in percent: without polling and searching; if it can be had.
    pub fn efficiency(&self) -> Option<f64> {
        self.has("efficiency_pct").then_some(self.efficiency_pct)
    }

    /// As JSON, without the fields that cannot be had on this host or of a VM.
    ///
    /// # Errors
    /// None that are known: it is plain data.
    pub fn to_json(&self) -> anyhow::Result<Value> {
        let json = serde_json::to_value(self);
        let mut json = json.context("the window cannot be written as JSON")?;
        remove_keys(&mut json, &self.unseen);
        Ok(json)
    }
}

fn remove_keys(json: &mut Value, keys: &[String]) {
    match json {
        Value::Object(fields) => {
            let halted_by = fields.get("halted_by").and_then(Value::as_str);
            let halted_by = halted_by.unwrap_or_default().to_owned();
            fields.retain(|key, _| !keys.contains(key) && HaltedBy::shows(&halted_by, key));
            fields
                .values_mut()
                .for_each(|value| remove_keys(value, keys));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| remove_keys(value, keys)),
        _ => {}
    }
}

/// The least 2^i (us) below which a fraction of at least `quantile` of a histogram lies; `None` if it is empty.
pub fn quantile_us(histogram: &[u64], quantile: f64) -> Option<u64> {
    let all: u64 = histogram.iter().sum();
    let mut below = 0;
    for (bucket, count) in histogram.iter().enumerate() {
        below += count;
        if *count > 0 && below as f64 >= quantile * all as f64 {
            return Some(1 << bucket);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUCKETS: usize = 24;

    #[test]
    fn what_cannot_be_had_is_left_out_at_every_depth_and_read_back() {
        let vm = VmView {
            vcpus: BTreeMap::from([(0, VcpuView::default())]),
            ..VmView::default()
        };
        let view = HostView {
            unseen: vec!["spin_exits".into(), "efficiency_pct".into()],
            vms: BTreeMap::from([(5, vm)]),
            ..HostView::default()
        };
        let json = view.to_json().expect("it is plain data");
        assert!(!json.to_string().contains("spin_exits\":0"));
        assert!(json.get("efficiency_pct").is_none());
        assert!(json["vms"]["5"]["vcpus"]["0"].get("run_pct").is_some());
        assert_eq!(
            serde_json::from_value::<HostView>(json).expect("it was written by this"),
            view
        );
    }

    #[test]
    fn halted_time_that_is_not_seen_is_left_out_of_that_vm_only() {
        let vm = |halted_by: HaltedBy| {
            let vcpu = VcpuView {
                halted_by: halted_by.word().into(),
                ..VcpuView::default()
            };
            VmView {
                vcpus: BTreeMap::from([(0, vcpu.clone())]),
                all: vcpu,
                ..VmView::default()
            }
        };
        let view = HostView {
            vms: BTreeMap::from([(5, vm(HaltedBy::Exits)), (6, vm(HaltedBy::Unseen))]),
            ..HostView::default()
        };
        let json = view.to_json().expect("it is plain data");
        let has = |tgid: &str, of: &str| json.pointer(&format!("/vms/{tgid}/{of}/halted_pct"));
        assert!(has("5", "all").is_some() && has("5", "vcpus/0").is_some());
        assert!(has("6", "all").is_none() && has("6", "vcpus/0").is_none());
    }

    #[test]
    fn a_quantile_is_the_upper_end_of_its_bucket() {
        let mut histogram = [0; BUCKETS];
        assert_eq!(quantile_us(&histogram, 0.5), None);
        (histogram[3], histogram[6]) = (98, 2);
        assert_eq!(quantile_us(&histogram, 0.5), Some(8));
        assert_eq!(quantile_us(&histogram, 0.99), Some(64));
    }
}
