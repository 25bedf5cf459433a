//! seccomp user notification (`SECCOMP_RET_USER_NOTIF`): a call blocks until another process has answered.
#![expect(unsafe_code, reason = "seccomp with a listener, and its ioctls")]

use seccompiler::sock_filter;
use std::ffi::c_long;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

const NOTIF_RECV: u64 = 0xc050_2100;
const NOTIF_SEND: u64 = 0xc018_2101;

/// Response flag: the kernel executes the call.
const GO_ON: u32 = 1;

/// Offsets of the system call number and the lower half of its first argument in `struct seccomp_data`.
const NUMBER_OFFSET: u32 = 0;
const FAMILY_OFFSET: u32 = 16;

const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// `struct seccomp_notif`: a call that blocks.
#[repr(C)]
#[derive(Default)]
struct Notification {
    id: u64,
    pid: u32,
    flags: u32,
    number: i32,
    arch: u32,
    instruction_pointer: u64,
    arguments: [u64; 6],
}

#[repr(C)]
struct Answer {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

/// Installs a filter that notifies about each `socket` of this process and its children that is not a Unix socket,
/// and each `connect`; returns the listener. The architecture was checked by an earlier filter.
pub(super) fn ask_for_sockets() -> io::Result<OwnedFd> {
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let number = |call: c_long| u32::try_from(call).map_err(io::Error::other);
    let mut filter = [
        step(LOAD_WORD, 0, 0, NUMBER_OFFSET),
        step(JUMP_IF_EQUAL, 3, 0, number(libc::SYS_connect)?),
        step(JUMP_IF_EQUAL, 0, 3, number(libc::SYS_socket)?),
        step(LOAD_WORD, 0, 0, FAMILY_OFFSET),
        step(JUMP_IF_EQUAL, 1, 0, libc::AF_UNIX.unsigned_abs()),
        step(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(io::Error::other)?,
        filter: filter.as_mut_ptr().cast(),
    };
    // SAFETY: the kernel reads a sock_fprog and the instructions it points to, which outlive the call;
    // both crates' sock_filter are the kernel's.
    let asks = check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    })?;
    let asks = RawFd::try_from(asks).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(asks) })
}

/// The next notification. Blocks when there is none.
pub(super) fn next_call(asks: BorrowedFd<'_>) -> io::Result<u64> {
    let mut call = Notification::default();
    // SAFETY: the kernel writes a seccomp_notif, which has this layout and must be zeroes before.
    let done = unsafe { libc::ioctl(asks.as_raw_fd(), NOTIF_RECV as _, &raw mut call) };
    check(c_long::from(done)).map(|_| call.id)
}

/// Continues a call, or fails it.
pub(super) fn answer_call(asks: BorrowedFd<'_>, call: u64, refuse: Option<i32>) -> io::Result<()> {
    let mut answer = Answer {
        id: call,
        value: 0,
        error: refuse.map_or(0, |errno| -errno),
        flags: if refuse.is_none() { GO_ON } else { 0 },
    };
    // SAFETY: the kernel reads a seccomp_notif_resp, which has this layout.
    let done = unsafe { libc::ioctl(asks.as_raw_fd(), NOTIF_SEND as _, &raw mut answer) };
    check(c_long::from(done)).map(drop)
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
