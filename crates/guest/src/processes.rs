//! `ListProcesses`: lists the processes of the sandbox.

use crate::Guest;
use crate::error::Error;
use crate::procfs::{self, Stat};
use k8e_wire::ReplySink;
use k8e_wire::proto::{Done, Process, ProcessList, reply::Reply};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;

/// Bound on listed processes; a sandbox has far fewer (the default limit is 256).
const PROCESSES_MAX: usize = 4096;

/// Bytes of a command line in the list.
const CMDLINE_BYTES_MAX: u64 = 4096;

/// Processes of one reply: 32 with the longest command lines are 130 KiB, well below the frame limit.
const BATCH: usize = 32;

/// Sends the list; the final reply has a flag for a truncated list.
pub(crate) async fn list(guest: &Guest, replies: &mut ReplySink) -> Result<Reply, Error> {
    let mut pids = procfs::pids().map_err(Error::os("read", b"/proc"))?;
    // The spare supervisor is not listed: it has no command yet.
    pids.retain(|pid| guest.spare.pid() != Some(*pid));
    pids.sort_unstable();
    let truncated = pids.len() > PROCESSES_MAX;
    pids.truncate(PROCESSES_MAX);
    for batch in pids.chunks(BATCH) {
        let processes = batch.iter().filter_map(|pid| describe(*pid)).collect();
        replies
            .send(Reply::Processes(ProcessList { processes }))
            .await?;
        tokio::task::yield_now().await;
    }
    Ok(Reply::Done(Done {
        bytes: 0,
        truncated,
    }))
}

/// Number of live processes, without the guest and its spare supervisor.
pub(crate) fn count(guest: &Guest) -> Result<u32, Error> {
    let all = procfs::scan().map_err(Error::os("read", b"/proc"))?;
    let me = i32::try_from(std::process::id()).unwrap_or(1);
    let spare = guest.spare.pid();
    let others = all
        .iter()
        .filter(|stat| stat.is_live() && stat.pid != me && spare != Some(stat.pid));
    Ok(u32::try_from(others.count()).unwrap_or(u32::MAX))
}

/// None when the process is gone.
fn describe(pid: i32) -> Option<Process> {
    let stat = Stat::read(pid)?;
    let uid = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let mut cmdline = Vec::new();
    if let Ok(file) = std::fs::File::open(format!("/proc/{pid}/cmdline")) {
        // A process that exits meanwhile has an empty command line, as kernel threads have.
        let _ = file.take(CMDLINE_BYTES_MAX).read_to_end(&mut cmdline);
    }
    if cmdline.last() == Some(&0) {
        cmdline.pop();
    }
    Some(Process {
        pid,
        ppid: stat.ppid,
        state: char::from(stat.state).to_string(),
        comm: stat.comm.into(),
        cmdline: cmdline.into(),
        rss_bytes: stat.rss_pages.saturating_mul(crate::sys::page_bytes()),
        uid,
    })
}
