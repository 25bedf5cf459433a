//! Detects whether the foreground process of a terminal waits for input, as far as the kernel reports it.
//!
//! `/proc/PID/syscall` shows the blocking system call of a process. One that reads its terminal waits for input;
//! so does one that polls only descriptor 0, as shells and interpreters do. One
//! that polls many descriptors may wait for any of them, and a kernel without that file (gVisor) shows
//! nothing: then the answer is unknown.

use crate::procfs::{self, Stat};
use k8e_wire::proto::Waiting;
use std::ffi::c_long;
use std::os::unix::ffi::OsStrExt as _;

/// Bound on the threads of a process that are checked.
const THREADS_MAX: usize = 64;

/// Bound on the descriptors of a process that are checked.
const FDS_MAX: usize = 256;

/// Polls descriptor 0, when that is the only one.
#[cfg(target_arch = "x86_64")]
const SELECTS: &[c_long] = &[libc::SYS_pselect6, libc::SYS_select];
#[cfg(not(target_arch = "x86_64"))]
const SELECTS: &[c_long] = &[libc::SYS_pselect6];

/// Polls many descriptors.
#[cfg(target_arch = "x86_64")]
const POLLS: &[c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_poll,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
];
#[cfg(not(target_arch = "x86_64"))]
const POLLS: &[c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
];

/// Whether a process of the group waits for input from the terminal.
pub(super) fn waiting(group: i32, terminal: &[u8]) -> Waiting {
    if group <= 1 {
        return Waiting::Unspecified;
    }
    let Ok(all) = procfs::scan() else {
        return Waiting::Unspecified;
    };
    let members = all
        .into_iter()
        .filter(|stat| stat.pgrp == group && stat.is_live());
    any(members.map(|member| process(&member, terminal)))
}

fn process(stat: &Stat, terminal: &[u8]) -> Waiting {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", stat.pid)) else {
        return Waiting::Unspecified;
    };
    let threads = threads.flatten().take(THREADS_MAX);
    any(threads.map(|thread| {
        let said = std::fs::read_to_string(thread.path().join("syscall"));
        match said {
            Ok(said) => judge(&said, &mut |fd| is_terminal(stat.pid, fd, terminal)),
            Err(_) => Waiting::Unspecified,
        }
    }))
}

/// Interprets a line of `/proc/PID/syscall`. `is_terminal` checks a descriptor, or with none
/// whether any is a terminal.
fn judge(said: &str, is_terminal: &mut dyn FnMut(Option<u64>) -> bool) -> Waiting {
    let mut words = said.split_ascii_whitespace();
    let Some(Ok(number)) = words.next().map(str::parse::<c_long>) else {
        // Running, not blocked.
        return Waiting::No;
    };
    let argument = words
        .next()
        .and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok())
        .unwrap_or(u64::MAX);
    let yes = |yes: bool| if yes { Waiting::Yes } else { Waiting::No };
    match number {
        libc::SYS_read | libc::SYS_readv => yes(is_terminal(Some(argument))),
        number if SELECTS.contains(&number) && argument == 1 => yes(is_terminal(Some(0))),
        number if SELECTS.contains(&number) || POLLS.contains(&number) => match is_terminal(None) {
            true => Waiting::Unspecified,
            false => Waiting::No,
        },
        _ => Waiting::No,
    }
}

/// One that waits is enough; no is only known when all are known.
fn any(all: impl Iterator<Item = Waiting>) -> Waiting {
    let mut known = Waiting::No;
    for one in all {
        match one {
            Waiting::Yes => return Waiting::Yes,
            Waiting::Unspecified => known = Waiting::Unspecified,
            Waiting::No => {}
        }
    }
    known
}

fn is_terminal(pid: i32, fd: Option<u64>, terminal: &[u8]) -> bool {
    let leads = |link: std::io::Result<std::path::PathBuf>| {
        link.is_ok_and(|to| {
            let to = to.as_os_str().as_bytes();
            to == terminal || to == b"/dev/tty"
        })
    };
    match fd {
        Some(fd) => leads(std::fs::read_link(format!("/proc/{pid}/fd/{fd}"))),
        None => {
            let Ok(fds) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
                return true;
            };
            let mut fds = fds.flatten().take(FDS_MAX);
            fds.any(|fd| leads(std::fs::read_link(fd.path())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_judged() {
        let mut zero = |fd: Option<u64>| matches!(fd, Some(0) | None);
        let read = libc::SYS_read;
        let select = libc::SYS_pselect6;
        let poll = libc::SYS_ppoll;
        for (said, wanted) in [
            ("running".to_owned(), Waiting::No),
            ("-1 0x7ff 0x5".to_owned(), Waiting::No),
            (format!("{read} 0x0 0x7f00 0x400"), Waiting::Yes),
            (format!("{read} 0x3 0x7f00 0x400"), Waiting::No),
            (format!("{select} 0x1 0x7f00"), Waiting::Yes),
            (format!("{select} 0x9 0x7f00"), Waiting::Unspecified),
            (format!("{poll} 0x7f 0x2"), Waiting::Unspecified),
            (format!("{} 0x7f", libc::SYS_wait4), Waiting::No),
            (String::new(), Waiting::No),
        ] {
            assert_eq!(judge(&said, &mut zero), wanted, "{said}");
        }
        assert_eq!(judge(&format!("{poll} 0x7f"), &mut |_| false), Waiting::No);
    }
}
