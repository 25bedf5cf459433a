//! Resource limits of a sandbox.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const MIB: u64 = 1024 * 1024;

/// Resource limits of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory of all its processes, its page cache and its tmpfs.
    pub memory_bytes: u64,
    /// Thousandths of a CPU.
    pub cpu_millis: u32,
    /// Processes and threads.
    pub pids: u32,
    /// The writable layer: everything it adds or changes in its root file system.
    pub disk_bytes: u64,
}

/// Limits in a request; `None` is the server's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitsSpec {
    /// As [`Limits::memory_bytes`].
    pub memory_bytes: Option<u64>,
    /// As [`Limits::cpu_millis`].
    pub cpu_millis: Option<u32>,
    /// As [`Limits::pids`].
    pub pids: Option<u32>,
    /// As [`Limits::disk_bytes`].
    pub disk_bytes: Option<u64>,
}

/// A limited resource, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// In bytes.
    Memory,
    /// In thousandths of a CPU.
    Cpu,
    /// Processes and threads.
    Pids,
    /// In bytes.
    Disk,
}

/// A limit that can be hit while a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// The kernel killed a process for memory.
    Memory,
    /// The kernel refused a new process or thread.
    Pids,
}

/// How often limits were hit since the sandbox started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitEvents {
    /// Processes killed for memory.
    pub oom_kills: u64,
    /// Forks refused.
    pub pids_refused: u64,
}

/// What a sandbox uses, by the counters of its control group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// CPU time since it was launched or restored; none where the kernel does not count it.
    pub cpu_time: Option<Duration>,
    /// Memory of its processes, without page cache.
    pub memory_bytes: u64,
    /// Page cache of its files, which the kernel reclaims when memory is needed.
    pub cache_bytes: u64,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 512 * MIB,
            cpu_millis: 1000,
            pids: 256,
            disk_bytes: 4096 * MIB,
        }
    }
}

impl Limits {
    /// Checks that a sandbox can work with these limits.
    pub fn check(&self) -> Result<(), Error> {
        // Below the lower bounds an interpreter does not start; values above the upper ones are typos.
        let memory_max = 1024 * 1024 * MIB;
        let disk_max = 16 * 1024 * 1024 * MIB;
        within(Quantity::Memory, self.memory_bytes, 16 * MIB, memory_max)?;
        within(Quantity::Cpu, self.cpu_millis.into(), 10, 1_024_000)?;
        within(Quantity::Pids, self.pids.into(), 8, 4_000_000)?;
        within(Quantity::Disk, self.disk_bytes, 16 * MIB, disk_max)
    }
}

// === impl LimitsSpec ===

impl LimitsSpec {
    /// The limits, with the server's defaults filled in, or why no sandbox can work with them.
    pub fn or(self, default: Limits) -> Result<Limits, Error> {
        let limits = Limits {
            memory_bytes: self.memory_bytes.unwrap_or(default.memory_bytes),
            cpu_millis: self.cpu_millis.unwrap_or(default.cpu_millis),
            pids: self.pids.unwrap_or(default.pids),
            disk_bytes: self.disk_bytes.unwrap_or(default.disk_bytes),
        };
        limits.check().map(|()| limits)
    }
}

impl From<Limits> for LimitsSpec {
    fn from(limits: Limits) -> Self {
        Self {
            memory_bytes: Some(limits.memory_bytes),
            cpu_millis: Some(limits.cpu_millis),
            pids: Some(limits.pids),
            disk_bytes: Some(limits.disk_bytes),
        }
    }
}

// === impl LimitEvents ===

impl LimitEvents {
    /// Which limits were hit since `before`.
    pub fn since(&self, before: &Self) -> Vec<LimitKind> {
        let mut hit = Vec::new();
        if self.oom_kills > before.oom_kills {
            hit.push(LimitKind::Memory);
        }
        if self.pids_refused > before.pids_refused {
            hit.push(LimitKind::Pids);
        }
        hit
    }
}

impl LimitKind {
    /// As it is written in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

// === impl Quantity ===

impl Quantity {
    /// What is limited, in an error.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Disk => "disk",
        }
    }

    /// As flags are named after it: `--cpus`, `--max-cpus`.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpus",
            Self::Pids => "pids",
            Self::Disk => "disk",
        }
    }

    /// A value as people write it, in the unit that flags take.
    pub fn text(self, value: u64) -> String {
        match self {
            Self::Memory | Self::Disk => size_text(value),
            Self::Cpu => format!("{} CPUs", thousandths(value)),
            Self::Pids => format!("{value} processes"),
        }
    }
}

/// Bytes as flags take them, `512MiB` or `4GiB`; what is no whole number of MiB in bytes.
pub fn size_text(bytes: u64) -> String {
    let gib = 1024 * MIB;
    match bytes {
        bytes if bytes >= gib && bytes.is_multiple_of(gib) => format!("{}GiB", bytes / gib),
        bytes if bytes >= MIB && bytes.is_multiple_of(MIB) => format!("{}MiB", bytes / MIB),
        bytes if bytes >= MIB => format!("{bytes} bytes (about {}MiB)", bytes / MIB),
        bytes => format!("{bytes} bytes"),
    }
}

/// `2000` as `2`, `1500` as `1.5`.
fn thousandths(value: u64) -> String {
    let text = format!("{}.{:03}", value / 1000, value % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn within(quantity: Quantity, value: u64, min: u64, max: u64) -> Result<(), Error> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} limit of {} is out of range: use {} to {}",
        quantity.noun(),
        quantity.text(value),
        quantity.text(min),
        quantity.text(max)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_as_flags_take_them() {
        for (quantity, value, text) in [
            (Quantity::Memory, 512 * MIB, "512MiB"),
            (Quantity::Disk, 4096 * MIB, "4GiB"),
            (Quantity::Memory, 1000, "1000 bytes"),
            (Quantity::Memory, MIB + 1, "1048577 bytes (about 1MiB)"),
            (Quantity::Memory, 0, "0 bytes"),
            (Quantity::Cpu, 64_000, "64 CPUs"),
            (Quantity::Cpu, 1500, "1.5 CPUs"),
            (Quantity::Cpu, 10, "0.01 CPUs"),
            (Quantity::Pids, 8, "8 processes"),
        ] {
            assert_eq!(quantity.text(value), text);
        }
    }

    #[test]
    fn what_is_not_set_is_the_default() {
        let none = LimitsSpec::default();
        let or_default = |spec: LimitsSpec| spec.or(Limits::default());
        assert_eq!(or_default(none).unwrap(), Limits::default());
        let pids = |pids| LimitsSpec {
            pids: Some(pids),
            ..none
        };
        assert_eq!(or_default(pids(64)).unwrap().pids, 64);
        assert!(or_default(pids(1)).is_err());
        let memory = LimitsSpec {
            memory_bytes: Some(1),
            ..none
        };
        assert!(or_default(memory).is_err());
        let all = LimitsSpec::from(Limits::default());
        assert_eq!(or_default(all).unwrap(), Limits::default());
    }
}
