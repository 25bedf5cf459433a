//! Free memory and idle CPU of this machine, from `/proc`.

use k8e_model::Spare;
use std::fs;
use std::time::Duration;
use tokio::time::Instant;

/// Sampling interval: CPU usage over less time is too noisy.
const SAMPLE_EVERY: Duration = Duration::from_millis(200);

/// Rate-limited sampler of free memory and idle CPU.
#[derive(Default)]
pub(super) struct Machine {
    spare: Spare,
    sampled: Option<(Instant, Ticks)>,
}

/// CPU time counters of all CPUs since boot, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
    cpus: u64,
}

// === impl Machine ===

impl Machine {
    pub(super) fn spare(&mut self) -> Spare {
        let now = Instant::now();
        let fresh = |(at, _): &(Instant, Ticks)| now.saturating_duration_since(*at) < SAMPLE_EVERY;
        if self.sampled.as_ref().is_some_and(fresh) {
            return self.spare;
        }
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let ticks = ticks(&read("/proc/stat"));
        let before = self.sampled.map(|(_, before)| before);
        self.spare = Spare {
            memory_bytes: available_bytes(&read("/proc/meminfo")),
            cpu_millis: before
                .zip(ticks)
                .and_then(|(before, ticks)| ticks.idle_millis(before)),
        };
        self.sampled = ticks.map(|ticks| (now, ticks));
        self.spare
    }
}

// === impl Ticks ===

impl Ticks {
    fn idle_millis(self, before: Self) -> Option<u32> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        let idle = self.idle.saturating_sub(before.idle).min(all);
        u32::try_from(idle.saturating_mul(1000).saturating_mul(self.cpus) / all).ok()
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

fn ticks(stat: &str) -> Option<Ticks> {
    let sum = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = sum
        .split_whitespace()
        .map_while(|n| n.parse().ok())
        .collect();
    let numbered = |line: &&str| {
        let rest = line.strip_prefix("cpu");
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    Some(Ticks {
        // Fields of proc(5): 4th idle, 5th iowait; guest time, from the 9th on, is included in user time already.
        idle: fields.iter().skip(3).take(2).sum(),
        all: fields.iter().take(8).sum(),
        cpus: stat.lines().filter(numbered).count() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_and_stat_are_parsed() {
        let meminfo = "MemTotal: 8 kB\nMemAvailable:    4096 kB\n";
        assert_eq!(available_bytes(meminfo), Some(4 << 20));
        assert_eq!(available_bytes("MemTotal: 1 kB"), None);
        let before = ticks("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1\ncpu1 1\nintr 7\n").unwrap();
        assert_eq!((before.idle, before.all, before.cpus), (80, 100, 2));
        let after = Ticks {
            idle: 130,
            all: 200,
            cpus: 2,
        };
        assert_eq!(after.idle_millis(before), Some(1000));
        assert_eq!(before.idle_millis(before), None);
        assert_eq!(ticks(""), None);
    }

    #[test]
    fn available_memory_of_this_machine_is_read() {
        assert!(Machine::default().spare().memory_bytes > Some(0));
    }
}
