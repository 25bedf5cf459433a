//! Out-of-memory (OOM) killer, for gVisor sandboxes: the sentry has none, and the host's OOM killer sees only
//! the sentry, whose end is the sandbox's. So the host's driver calls `KillLargest`.

use crate::error::Error;
use crate::procfs::{self, Stat};
use crate::{Guest, sys};
use k8e_wire::proto::{KillLargest, Killed, reply::Reply};
use std::cmp::Reverse;

/// Kills the processes with the largest resident sets. Does not wait for their exit: the host measures what
/// that frees.
pub(crate) fn kill_largest(guest: &Guest, request: &KillLargest) -> Result<Reply, Error> {
    let me = i32::try_from(std::process::id()).unwrap_or(1);
    let mut all = procfs::scan().map_err(Error::os("read", b"/proc"))?;
    // Supervisors, the spare one too, share the guest's memory and have none of their own.
    all.retain(|stat| stat.is_live() && stat.pid != me && !guest.supervisors.contains(stat.pid));
    let victims = choose(all, request.bytes, sys::page_bytes());
    let mut killed = Killed::default();
    for (pid, rss_bytes) in victims {
        sys::kill(pid, libc::SIGKILL);
        killed.processes += 1;
        killed.rss_bytes = killed.rss_bytes.saturating_add(rss_bytes);
    }
    Ok(Reply::Killed(killed))
}

/// The largest ones whose resident sets add up to `bytes`, at least one: process ids and resident bytes.
fn choose(mut all: Vec<Stat>, bytes: u64, page_bytes: u64) -> Vec<(i32, u64)> {
    all.sort_unstable_by_key(|stat| Reverse(stat.rss_pages));
    let mut chosen = Vec::new();
    let mut total = 0u64;
    for stat in all {
        if !chosen.is_empty() && total >= bytes {
            break;
        }
        let rss_bytes = stat.rss_pages.saturating_mul(page_bytes);
        total = total.saturating_add(rss_bytes);
        chosen.push((stat.pid, rss_bytes));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_go_first_and_no_more_than_needed() {
        let stat = |pid, rss_pages| Stat {
            pid,
            comm: Vec::new(),
            state: b'R',
            ppid: 1,
            pgrp: 1,
            session: 1,
            rss_pages,
        };
        let all = || vec![stat(2, 10), stat(3, 500), stat(4, 0), stat(5, 300)];
        let pids = |bytes| {
            let chosen = choose(all(), bytes, 4096);
            chosen.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>()
        };
        assert_eq!(pids(0), [3]);
        assert_eq!(pids(500 * 4096), [3]);
        assert_eq!(pids(500 * 4096 + 1), [3, 5]);
        assert_eq!(pids(u64::MAX), [3, 5, 2, 4]);
        assert_eq!(choose(Vec::new(), 1, 4096), []);
    }
}
