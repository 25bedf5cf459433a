//! What one sandbox may use.

use crate::Error;
use serde::{Deserialize, Serialize};

const MIB: u64 = 1024 * 1024;

/// What one sandbox may use.
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
    /// What a request asks for: 0 keeps `self`'s value. Checked against what can work.
    pub fn with(self, asked: Self) -> Result<Self, Error> {
        let or = |asked: u64, default: u64| if asked == 0 { default } else { asked };
        let limits = Self {
            memory_bytes: or(asked.memory_bytes, self.memory_bytes),
            cpu_millis: if asked.cpu_millis == 0 {
                self.cpu_millis
            } else {
                asked.cpu_millis
            },
            pids: if asked.pids == 0 {
                self.pids
            } else {
                asked.pids
            },
            disk_bytes: or(asked.disk_bytes, self.disk_bytes),
        };
        limits.check().map(|()| limits)
    }

    /// Whether a sandbox can live with these.
    pub fn check(&self) -> Result<(), Error> {
        // Below the lower bounds an interpreter does not start; above the upper ones a typo is likelier than a wish.
        within(
            "memory",
            "bytes",
            self.memory_bytes,
            16 * MIB,
            1024 * 1024 * MIB,
        )?;
        within(
            "cpu",
            "thousandths",
            u64::from(self.cpu_millis),
            10,
            1_024_000,
        )?;
        within("pids", "processes", u64::from(self.pids), 8, 4_000_000)?;
        within(
            "disk",
            "bytes",
            self.disk_bytes,
            16 * MIB,
            16 * 1024 * 1024 * MIB,
        )
    }
}

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

fn within(noun: &str, unit: &str, value: u64, min: u64, max: u64) -> Result<(), Error> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{noun} limit of {value} {unit} is out of range: use {min} to {max}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_keeps_the_default() {
        let zero = Limits {
            memory_bytes: 0,
            cpu_millis: 0,
            pids: 0,
            disk_bytes: 0,
        };
        assert_eq!(Limits::default().with(zero).unwrap(), Limits::default());
        let some = Limits { pids: 64, ..zero };
        assert_eq!(Limits::default().with(some).unwrap().pids, 64);
        assert!(
            Limits::default()
                .with(Limits {
                    memory_bytes: 1,
                    ..zero
                })
                .is_err()
        );
        assert!(Limits::default().with(Limits { pids: 1, ..zero }).is_err());
    }
}
