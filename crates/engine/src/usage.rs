//! Metrics of one session: CPU, memory and disk that its sandbox uses, and its limits.
//!
//! CPU and memory are counters of the kernel, outside the sandbox. The usage of the disk is what the guest reports of its
//! file system, bounded by the limit.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Principal, SessionId, UnixMillis, WORKSPACE};
use k8e_wire::proto::{StatDisk, reply, request};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Time over which CPU usage is measured: several periods of the CPU limit (100 ms), and short for a call.
const MEASURED_FOR: Duration = Duration::from_millis(300);

/// What a session uses, and what it may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SessionMetrics {
    /// Time of the measurement.
    pub at: UnixMillis,
    /// CPU limit, in thousandths of a CPU.
    pub cpu_millis: u32,
    /// CPU usage in percent of the limit, over the last 300 milliseconds.
    pub cpu_used_percent: f64,
    /// CPU time since the sandbox was launched, or restored from disk.
    pub cpu_time: Duration,
    /// Memory of its processes, without page cache.
    pub memory_used_bytes: u64,
    /// Memory limit.
    pub memory_total_bytes: u64,
    /// Page cache of its files, which is reclaimed when memory is needed.
    pub memory_cache_bytes: u64,
    /// Used part of its file system.
    pub disk_used_bytes: u64,
    /// Size of its file system.
    pub disk_total_bytes: u64,
}

// === impl Sessions ===

impl Sessions {
    /// Measures a session, which takes 300 milliseconds and counts as a use of it. A sub-agent has the numbers of the
    /// sandbox that it shares.
    pub async fn session_metrics(
        &self,
        who: &Principal,
        id: &SessionId,
    ) -> Result<SessionMetrics, Error> {
        let path = Bytes::from_static(WORKSPACE.as_bytes());
        let request = request::Call::StatDisk(StatDisk { path });
        let mut call = self
            .call(who, id, request, "measure the disk".to_owned())
            .await?;
        let disk = match call.reply().await? {
            reply::Reply::DiskUse(disk) => disk,
            _ => return Err(call.misbehaved("it answered with something else than its disk")),
        };
        // The call is held meanwhile: the session is in use, and not stopped as idle.
        let live = &call.used.live;
        let limits = live.record.limits;
        let usage = || {
            let usage = live.sandbox().and_then(|sandbox| sandbox.usage());
            usage.ok_or(Error::NoMetrics)
        };
        let (before, began) = (usage()?, Instant::now());
        sleep(MEASURED_FOR).await;
        let (after, took) = (usage()?, began.elapsed());
        let used = after.cpu_time.zip(before.cpu_time);
        let used = used.map(|(after, before)| after.saturating_sub(before));
        let cpus = f64::from(limits.cpu_millis) / 1000.0;
        let percent = used.unwrap_or_default().as_secs_f64() / took.as_secs_f64() / cpus * 100.0;
        let disk_total_bytes = disk.total_bytes.min(limits.disk_bytes);
        Ok(SessionMetrics {
            at: now_ms(),
            cpu_millis: limits.cpu_millis,
            cpu_used_percent: if percent.is_finite() { percent } else { 0.0 },
            cpu_time: after.cpu_time.unwrap_or_default(),
            memory_used_bytes: after.memory_bytes,
            memory_total_bytes: limits.memory_bytes,
            memory_cache_bytes: after.cache_bytes,
            disk_used_bytes: disk.used_bytes.min(disk_total_bytes),
            disk_total_bytes,
        })
    }
}
