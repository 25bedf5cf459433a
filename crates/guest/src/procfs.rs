//! Reads `/proc`: parents and children, for killing process trees and for listing processes.

use std::io;
use std::io::Read as _;

/// Bytes read of a stat line; a line has about 350.
const STAT_BYTES_MAX: usize = 1024;

/// The fields of `/proc/PID/stat` that the guest uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Process id.
    pub(crate) pid: i32,
    /// Name of the program, truncated by the kernel to 15 bytes.
    pub(crate) comm: Vec<u8>,
    /// State letter.
    pub(crate) state: u8,
    /// Parent process id.
    pub(crate) ppid: i32,
    /// Process group id.
    pub(crate) pgrp: i32,
    /// Session id.
    pub(crate) session: i32,
    /// Resident set, in pages.
    pub(crate) rss_pages: u64,
}

/// Whether a process ignores a signal (`SigIgn`); false where the kernel has no such field (gVisor).
pub(crate) fn ignores(pid: i32, signal: i32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
        return false;
    };
    let mask = |line: &str| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok();
    let ignored = status.lines().find_map(mask).unwrap_or(0);
    ignored & (1 << (signal - 1)) != 0
}

// === impl Stat ===

impl Stat {
    /// The process, or none when it is gone.
    pub(crate) fn read(pid: i32) -> Option<Self> {
        let mut line = [0; STAT_BYTES_MAX];
        let mut file = std::fs::File::open(format!("/proc/{pid}/stat")).ok()?;
        let bytes = file.read(&mut line).ok()?;
        Self::parse(pid, &line[..bytes])
    }

    /// Whether it is neither a zombie nor dead.
    pub(crate) fn is_live(&self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x')
    }

    /// Whether it is stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self.state, b'T' | b't')
    }

    fn parse(pid: i32, line: &[u8]) -> Option<Self> {
        // The name may hold any byte, spaces and parentheses too: it ends at the last parenthesis.
        let open = line.iter().position(|byte| *byte == b'(')?;
        let close = line.iter().rposition(|byte| *byte == b')')?;
        let comm = line.get(open + 1..close)?.to_vec();
        let rest = std::str::from_utf8(line.get(close + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let mut number = || fields.next()?.parse::<i64>().ok();
        let mut id = || i32::try_from(number()?).ok();
        let (ppid, pgrp, session) = (id()?, id()?, id()?);
        // Field 24 of the line; `session` is field 6.
        let rss = rest
            .split_ascii_whitespace()
            .nth(24 - 3)
            .and_then(|field| field.parse().ok());
        Some(Self {
            pid,
            comm,
            state,
            ppid,
            pgrp,
            session,
            rss_pages: rss.unwrap_or(0),
        })
    }
}

/// Every process, unordered.
pub(crate) fn scan() -> io::Result<Vec<Stat>> {
    Ok(pids()?.into_iter().filter_map(Stat::read).collect())
}

/// Every process id.
pub(crate) fn pids() -> io::Result<Vec<i32>> {
    let pid = |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Ok(std::fs::read_dir("/proc")?.filter_map(pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_does_not_confuse_the_fields() {
        let line = b"7 (a) S 1 1 (b) R 3 4 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 9 1000 77 0\n";
        let stat = Stat::parse(7, line).unwrap();
        assert_eq!(
            (stat.comm.as_slice(), stat.state),
            (&b"a) S 1 1 (b"[..], b'R')
        );
        assert_eq!(
            (stat.ppid, stat.pgrp, stat.session, stat.rss_pages),
            (3, 4, 5, 77)
        );
    }

    #[test]
    fn this_process_is_found() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(
            scan()
                .unwrap()
                .iter()
                .any(|stat| stat.pid == me && stat.rss_pages > 0)
        );
    }
}
