//! System calls that no crate of ours wraps, each behind a safe function.
#![expect(
    unsafe_code,
    reason = "raw system calls: clone3, mount_setattr, loop ioctls, execveat, keyctl, bpf"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Result of `fork_into`.
pub(crate) enum Fork {
    /// In the new process.
    Child,
    /// In the parent: the pid and pidfd of the new process.
    Parent {
        /// In the caller's pid namespace.
        pid: i32,
        /// Stays valid when the pid is reused.
        pidfd: OwnedFd,
    },
}

/// libc has it as an int, in which it does not fit.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Forks into new namespaces, and into a cgroup v2 group (`clone3`).
///
/// The caller must be single-threaded: the child goes on to allocate and lock.
pub(crate) fn fork_into(namespaces: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Fork> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args is plain data for which all zeroes is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces | libc::CLONE_PIDFD as u64;
    args.pidfd = std::ptr::from_mut(&mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or(u64::MAX);
    }
    // SAFETY: without CLONE_VM this is fork: the child gets its own copy of everything. args and
    // pidfd live until the call returns, and the size is that of the struct passed.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut args,
            size_of::<libc::clone_args>(),
        )
    };
    match check(pid)? {
        0 => Ok(Fork::Child),
        pid => {
            // SAFETY: the kernel has just stored a new descriptor there that nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Fork::Parent {
                pid: i32::try_from(pid).unwrap_or(i32::MAX),
                pidfd,
            })
        }
    }
}

/// Moves this process into new namespaces (`unshare`).
pub(crate) fn unshare(namespaces: rustix::thread::UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: no caller passes FILES: descriptors stay those of the process.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }
}

/// Watches a pidfd: it becomes readable when its process has ended, and stays so.
pub(crate) fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd gives the same open descriptor for as long as it lives.
    let watched = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    watched.map_err(|error| error.into_parts().1)
}

/// Ends this process without running anything of the process it was forked from.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: _exit only ends the process.
    unsafe { libc::_exit(code) }
}

/// Changes attributes of the mount that `mount` refers to.
pub(crate) fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    userns: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    // SAFETY: mount_attr is plain data for which all zeroes is valid.
    let mut attr: libc::mount_attr = unsafe { std::mem::zeroed() };
    attr.attr_set = set;
    if let Some(userns) = userns {
        attr.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attr.userns_fd = u64::try_from(userns.as_raw_fd()).unwrap_or(u64::MAX);
    }
    let flags = libc::AT_EMPTY_PATH;
    // SAFETY: the path is a NUL-terminated constant, attr lives until the call returns and its size is passed.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw mut attr,
            size_of::<libc::mount_attr>(),
        )
    };
    check(done).map(drop)
}

/// Writes back the file system that is mounted from a block device (`BLKFLSBUF`).
pub(crate) fn flush_block_device(device: BorrowedFd<'_>) -> io::Result<()> {
    const BLKFLSBUF: libc::Ioctl = 0x1261;
    // SAFETY: the request has no argument; the descriptor is open.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), BLKFLSBUF, 0) };
    check(c_long::from(done)).map(drop)
}

/// Joins a new session keyring, so that the process has none of the server's keys.
pub(crate) fn leave_session_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: c_int = 1;
    // SAFETY: a null name asks for a new anonymous keyring; nothing is read through the pointer.
    let done = unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            KEYCTL_JOIN_SESSION_KEYRING,
            std::ptr::null::<c_char>(),
        )
    };
    match check(done) {
        // A kernel without keyrings has none to leave.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        done => done.map(drop),
    }
}

/// Replaces the process by the program that `program` refers to, with no environment.
pub(crate) fn exec(program: BorrowedFd<'_>, name: &CStr) -> io::Error {
    let argv = [name.as_ptr(), std::ptr::null()];
    let envp = [std::ptr::null::<c_char>()];
    // SAFETY: argv and envp are null-terminated arrays of NUL-terminated strings that outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Marks every descriptor from `first` on to be closed by exec.
pub(crate) fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    // SAFETY: only sets a flag on descriptors.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            c_int::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    check(done).map(drop)
}

/// Keeps nothing open but `kept`; standard streams become /dev/null.
pub(crate) fn close_others(kept: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const KEPT: RawFd = 3;
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    // SAFETY: the caller has been forked to do nothing else: no owner of a descriptor that is closed or
    // replaced here is used again.
    unsafe {
        check(c_long::from(libc::dup2(kept.as_raw_fd(), KEPT)))?;
        check(libc::syscall(
            libc::SYS_close_range,
            KEPT + 1,
            c_int::MAX,
            0,
        ))?;
    }
    std::mem::forget(null);
    // SAFETY: it is open, and nobody else in this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(KEPT) })
}

/// Keeps nothing open but these, from descriptor 3 on in the order given, and the standard streams.
pub(crate) fn keep_only<const N: usize>(fds: [OwnedFd; N]) -> io::Result<[OwnedFd; N]> {
    const FIRST: RawFd = 3;
    // None may have the number that another gets.
    let mut moved = Vec::with_capacity(N);
    for fd in fds {
        moved.push(move_up(fd)?);
    }
    let last = FIRST + RawFd::try_from(N).map_err(io::Error::other)?;
    // SAFETY: the caller has been forked to do nothing else: no owner of a descriptor that is closed or
    // replaced here is used again.
    unsafe {
        for (number, fd) in (FIRST..).zip(&moved) {
            check(c_long::from(libc::dup2(fd.as_raw_fd(), number)))?;
        }
        check(libc::syscall(libc::SYS_close_range, last, c_int::MAX, 0))?;
    }
    std::mem::forget(moved);
    // SAFETY: all are open, and nobody else in this process owns them.
    let kept = (FIRST..last).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let kept: Vec<OwnedFd> = kept.collect();
    Ok(kept.try_into().expect("there are as many as were given"))
}

/// Where the guest finds its listening socket.
pub(crate) const LISTENER_FD: RawFd = 3;

/// Puts the listener where the guest finds it; it stays open across exec.
pub(crate) fn place_listener(listener: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: replaces descriptor 3, which the launcher keeps free.
    check(c_long::from(unsafe {
        libc::dup2(listener.as_raw_fd(), LISTENER_FD)
    }))
    .map(drop)
}

/// Moves a descriptor out of the way of the numbers that the guest gets.
pub(crate) fn move_up(fd: OwnedFd) -> io::Result<OwnedFd> {
    const FIRST: c_int = 16;
    // SAFETY: makes a new descriptor that nobody else owns.
    let moved = check(c_long::from(unsafe {
        libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FIRST)
    }))?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(moved).expect("a descriptor is an int")) })
}

/// Sets every signal back to its default and unblocks all: ignored signals survive exec.
pub(crate) fn reset_signals() {
    // SAFETY: setting a disposition to the default installs no code of ours; the set is initialised by sigemptyset.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Has this process killed when the one that forked it ends.
pub(crate) fn end_with_parent() -> rustix::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
}

/// Lets the kernel reap the children of this process.
pub(crate) fn ignore_children() {
    // SAFETY: ignoring a signal installs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Attaches `backing` to a free loop device that goes away with its last user.
pub(crate) fn attach_loop(backing: BorrowedFd<'_>) -> io::Result<(OwnedFd, CString)> {
    const LOOP_CONFIGURE: u64 = 0x4C0A;
    const LOOP_CTL_GET_FREE: u64 = 0x4C82;
    const LO_FLAGS_AUTOCLEAR: u32 = 4;
    const LO_FLAGS_DIRECT_IO: u32 = 16;
    /// Another process may take the device between asking for it and configuring it.
    const TRIES_MAX: usize = 64;

    let control = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/loop-control")?;
    let mut flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    for _ in 0..TRIES_MAX {
        // SAFETY: this request takes no argument.
        let number = check(c_long::from(unsafe {
            libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _)
        }))?;
        let path = format!("/dev/loop{number}");
        let device = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)?;
        let mut config = LoopConfig::new(backing.as_raw_fd(), flags);
        // SAFETY: the kernel reads a loop_config of this layout and size.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw mut config) };
        match check(c_long::from(done)) {
            Ok(_) => {
                return Ok((
                    device.into(),
                    CString::new(path).expect("a formatted number has no NUL"),
                ));
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            // The file system below does not do direct IO.
            Err(error)
                if error.raw_os_error() == Some(libc::EINVAL)
                    && flags & LO_FLAGS_DIRECT_IO != 0 =>
            {
                flags &= !LO_FLAGS_DIRECT_IO;
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY))
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

// === impl LoopConfig ===

impl LoopConfig {
    fn new(fd: RawFd, flags: u32) -> Self {
        // SAFETY: both structs are plain data for which all zeroes is valid.
        let mut config: Self = unsafe { std::mem::zeroed() };
        config.fd = u32::try_from(fd).expect("an open descriptor is not negative");
        // The page size: what the file system on it uses, and what direct IO wants.
        config.block_size = 4096;
        config.info.flags = flags;
        config
    }
}

/// An eBPF instruction, in the kernel's layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BpfInstruction {
    code: u8,
    /// The destination register in the lower half, the source in the upper.
    registers: u8,
    offset: i16,
    immediate: i32,
}

// === impl BpfInstruction ===

impl BpfInstruction {
    const fn new(code: u8, registers: u8, offset: i16, immediate: i32) -> Self {
        Self {
            code,
            registers,
            offset,
            immediate,
        }
    }

    /// Loads into `to` the 32 bits at `offset` from the pointer in `from`.
    pub(crate) const fn load_word(to: u8, from: u8, offset: i16) -> Self {
        Self::new(0x61, to | from << 4, offset, 0)
    }

    pub(crate) const fn copy(to: u8, from: u8) -> Self {
        Self::new(0xbf, to | from << 4, 0, 0)
    }

    pub(crate) const fn set(to: u8, value: i32) -> Self {
        Self::new(0xb7, to, 0, value)
    }

    pub(crate) const fn and(to: u8, mask: i32) -> Self {
        Self::new(0x57, to, 0, mask)
    }

    pub(crate) const fn skip_if_equal(register: u8, value: i32, skip: i16) -> Self {
        Self::new(0x15, register, skip, value)
    }

    pub(crate) const fn skip_unless_equal(register: u8, value: i32, skip: i16) -> Self {
        Self::new(0x55, register, skip, value)
    }

    /// Ends the program with register 0 as its answer.
    pub(crate) const fn exit() -> Self {
        Self::new(0x95, 0, 0, 0)
    }
}

/// `union bpf_attr` for loading a program, as far as it is used.
#[repr(C)]
struct BpfLoad {
    program_type: u32,
    instructions_count: u32,
    instructions: u64,
    license: u64,
    rest: [u64; 6],
}

/// `union bpf_attr` for attaching one.
#[repr(C)]
struct BpfAttach {
    target: u32,
    program: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches `program` to this cgroup v2 group: it decides about each device that a process opens.
pub(crate) fn attach_device_program(
    group: BorrowedFd<'_>,
    program: &[BpfInstruction],
) -> io::Result<()> {
    const PROG_LOAD: c_int = 5;
    const PROG_ATTACH: c_int = 8;
    const TYPE_CGROUP_DEVICE: u32 = 15;
    const ATTACH_CGROUP_DEVICE: u32 = 6;
    const ALLOW_MULTI: u32 = 2;
    let number = |fd: RawFd| u32::try_from(fd).map_err(io::Error::other);
    let load = BpfLoad {
        program_type: TYPE_CGROUP_DEVICE,
        instructions_count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        rest: [0; 6],
    };
    // SAFETY: the kernel reads a bpf_attr of this size; the instructions and the NUL-terminated
    // license that it points to outlive the call.
    let loaded = check(unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_LOAD,
            &raw const load,
            size_of::<BpfLoad>(),
        )
    })?;
    let loaded = RawFd::try_from(loaded).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned a new descriptor that nobody else owns.
    let loaded = unsafe { OwnedFd::from_raw_fd(loaded) };
    let attach = BpfAttach {
        target: number(group.as_raw_fd())?,
        program: number(loaded.as_raw_fd())?,
        attach_type: ATTACH_CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the kernel reads a bpf_attr of this size, which outlives the call.
    let attached = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_ATTACH,
            &raw const attach,
            size_of::<BpfAttach>(),
        )
    };
    check(attached).map(drop)
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
