//! System calls that safe libraries do not offer: signals, reaping, and taking the inherited
//! listener. Making processes is in `exec/sys.rs`.
#![expect(
    unsafe_code,
    reason = "waitpid, signals and inherited descriptors have no safe interface"
)]

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use tokio::io::unix::AsyncFd;

/// Descriptor at which the launcher leaves the listening socket.
const LISTENER_FD: RawFd = 3;

/// Highest descriptor closed one by one where `close_range` is missing. More than the guest can
/// have open: 512 connections with less than 16 descriptors each.
pub(crate) const FDS_MAX: u32 = 8192;

/// The highest descriptor there can be. Not the highest unsigned number, which gVisor takes as -1.
pub(crate) const LAST_FD: u32 = i32::MAX.unsigned_abs();

/// Reaps one child: `pid`, or any with -1. None when none has ended.
pub(crate) fn reap(pid: i32) -> io::Result<Option<i32>> {
    // SAFETY: a null status pointer is allowed.
    match unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) } {
        0 => Ok(None),
        reaped if reaped > 0 => Ok(Some(reaped)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Signals a process, or with a negative id a process group. One that is gone is no error.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: kill takes two integers.
    unsafe { libc::kill(pid, signal) };
}

/// Nanoseconds of the monotonic clock, which is the same for every process of the machine.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: `time` is valid for writes; zeroes are a valid timespec should the call fail.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, time.as_mut_ptr());
        time.assume_init()
    };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Bytes of a page of memory.
pub(crate) fn page_bytes() -> u64 {
    // SAFETY: sysconf takes an integer.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Processes and threads of the sandbox, by one system call (`sysinfo`) on Linux and gVisor.
pub(crate) fn processes() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: `info` is valid for writes; zeroes are a valid value should the call fail.
    let info = unsafe {
        libc::sysinfo(info.as_mut_ptr());
        info.assume_init()
    };
    info.procs.into()
}

/// This process's `RLIMIT_NPROC`, if it has one.
pub fn process_limit() -> Option<u64> {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: `limit` is valid for writes, and read only when the call succeeded.
    let limit = unsafe {
        if libc::getrlimit(libc::RLIMIT_NPROC, limit.as_mut_ptr()) != 0 {
            return None;
        }
        limit.assume_init()
    };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Registers a descriptor with tokio.
pub(crate) fn polled(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned and open, and stays the same until both are dropped.
    Ok(unsafe { AsyncFd::register(fd) }?)
}

/// A random number, for file names that cannot be guessed.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is valid for writes of its length.
    let read = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if read == 8 {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Signals whose disposition is not the default one: a command gets them reset.
pub(crate) fn changed_signals() -> Vec<c_int> {
    let changed = |signal: &c_int| {
        let mut action = KernelAction::default();
        // SAFETY: `action` is valid for writes of what the kernel writes.
        unsafe { sigaction(*signal, std::ptr::null(), &mut action) };
        action.0[0] != libc::SIG_DFL as u64
    };
    (1..=64)
        .filter(|signal| !matches!(*signal, libc::SIGKILL | libc::SIGSTOP))
        .filter(changed)
        .collect()
}

/// Raises the soft limit of open files to what the guest may need. Returns the limit as it was.
pub(crate) fn raise_nofile() -> Option<(u64, u64)> {
    let mut limit = MaybeUninit::<libc::rlimit>::uninit();
    // SAFETY: `limit` is valid for writes, and read only when the call succeeded.
    let before = unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr()) != 0 {
            return None;
        }
        limit.assume_init()
    };
    let wanted = before.rlim_max.min(u64::from(FDS_MAX));
    if before.rlim_cur >= wanted {
        return None;
    }
    let raised = libc::rlimit {
        rlim_cur: wanted,
        rlim_max: before.rlim_max,
    };
    // SAFETY: `raised` is a valid rlimit.
    let done = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0;
    done.then_some((before.rlim_cur, before.rlim_max))
}

/// Takes the listening socket that the launcher left at descriptor 3.
pub fn inherited_listener() -> io::Result<OwnedFd> {
    let mut listening: c_int = 0;
    let mut bytes = 4 as libc::socklen_t;
    // SAFETY: `listening` and `bytes` are valid for writes and match in size.
    let done = unsafe {
        libc::getsockopt(
            LISTENER_FD,
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut listening).cast(),
            &mut bytes,
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    if listening == 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: fcntl on a descriptor that the call above proved open.
    unsafe { libc::fcntl(LISTENER_FD, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: it is open, a socket, and left here for us: nobody else in this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(LISTENER_FD) })
}

/// Forks a process and reaps it: the self-test of a kernel.
pub fn self_test() -> io::Result<()> {
    let mut status = -1;
    // SAFETY: the child only ends; `status` is valid for writes.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(0),
            pid if pid > 0 && libc::waitpid(pid, &mut status, 0) == pid => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::other(
            "the forked process exited with an unexpected status",
        ))
    }
}

/// The kernel's `struct sigaction` on 64-bit machines: handler, flags, restorer, mask. Zeroes are
/// the default disposition.
#[derive(Default)]
#[repr(C)]
pub(crate) struct KernelAction([u64; 4]);

// === impl KernelAction ===

impl KernelAction {
    /// SIG_IGN.
    pub(crate) fn ignore() -> Self {
        Self([libc::SIG_IGN as u64, 0, 0, 0])
    }
}

/// Not through glibc, which hides two signals that a parent can have ignored.
///
/// # Safety
/// `new` and `old` are null or valid.
unsafe fn sigaction(signal: c_int, new: *const KernelAction, old: *mut KernelAction) {
    // SAFETY: the caller vouches for the pointers; 8 is the size of the kernel's signal set.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, new, old, 8usize) };
}
