//! Every system call that safe libraries do not offer: forking a supervisor and its command,
//! reaping, and taking the inherited listener.
//!
//! Between `fork` and `execve` only async-signal-safe calls are made and nothing is allocated: in
//! tests the guest lives in a process with many threads, whose locks the fork may have copied held.
#![expect(
    unsafe_code,
    reason = "fork, clone, waitpid and inherited descriptors have no safe interface"
)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Descriptor on which the supervisor reports, after it moved it there.
const REPORT_FD: RawFd = 3;

/// Descriptor at which the launcher leaves the listening socket.
const LISTENER_FD: RawFd = 3;

/// Highest descriptor closed one by one where `close_range` is missing. More than the guest can
/// have open: 512 connections with less than 16 descriptors each.
pub(crate) const FDS_MAX: u32 = 8192;

/// The highest descriptor there can be. Not the highest unsigned number, which gVisor takes as -1.
const LAST_FD: u32 = i32::MAX.unsigned_abs();

/// Stack of the command between `clone` and `execve`; it makes a dozen shallow calls.
const STACK_BYTES: usize = 32 * 1024;

/// Where starting a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Making the process.
    Fork,
    /// Becoming the user.
    User,
    /// Entering the working directory.
    Chdir,
    /// Executing the program.
    Exec,
}

/// What a supervisor says; see [`Report::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// There is a process for the command. It says so itself: by the time the supervisor could, the
    /// command may have killed it.
    Made {
        /// Its process id.
        pid: i32,
    },
    /// It runs the program.
    Started,
    /// It could not be started.
    Failed {
        /// Where.
        stage: Stage,
        /// Why.
        errno: i32,
    },
    /// It ended.
    Ended {
        /// As `waitpid` says it.
        status: i32,
        /// When, on the monotonic clock.
        at_ns: u64,
    },
}

/// Everything a supervisor needs, made before the fork because afterwards nothing can be.
pub(crate) struct Plan<'a> {
    /// Standard input of the command.
    pub(crate) stdin: BorrowedFd<'a>,
    /// Its standard output.
    pub(crate) stdout: BorrowedFd<'a>,
    /// Its standard error.
    pub(crate) stderr: BorrowedFd<'a>,
    /// Where the supervisor reports.
    pub(crate) report: BorrowedFd<'a>,
    /// Paths of the program, tried in order.
    pub(crate) programs: &'a [CString],
    /// Arguments.
    pub(crate) argv: &'a [CString],
    /// Environment.
    pub(crate) envp: &'a [CString],
    /// Working directory.
    pub(crate) cwd: &'a CStr,
    /// Whom to become; none stays root.
    pub(crate) user: Option<Ids<'a>>,
    /// Signals that are not at their default here.
    pub(crate) signals: &'a [c_int],
    /// Limit of open files (soft, hard) that the command gets back.
    pub(crate) nofile: Option<(u64, u64)>,
}

/// Ids of a user.
#[derive(Clone, Copy)]
pub(crate) struct Ids<'a> {
    /// User.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// Further groups.
    pub(crate) groups: &'a [u32],
}

/// Raw pointers of a [`Plan`], as the command reads them.
struct Command<'a> {
    plan: &'a Plan<'a>,
    programs: &'a [*const c_char],
    argv: *const *const c_char,
    envp: *const *const c_char,
    mask: libc::sigset_t,
    failed: Option<(Stage, c_int)>,
}

// === impl Report ===

impl Report {
    /// Bytes of one report; below `PIPE_BUF`, so a report is written and read whole.
    pub(crate) const BYTES: usize = 24;

    fn encode(self) -> [u8; Self::BYTES] {
        let (kind, a, b, ns) = match self {
            Self::Made { pid } => (1i32, pid, 0i32, 0u64),
            Self::Started => (4, 0, 0, 0),
            Self::Failed { stage, errno } => (2, stage as i32, errno, 0),
            Self::Ended { status, at_ns } => (3, status, 0, at_ns),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[4..8].copy_from_slice(&a.to_ne_bytes());
        bytes[8..12].copy_from_slice(&b.to_ne_bytes());
        bytes[16..24].copy_from_slice(&ns.to_ne_bytes());
        bytes
    }

    /// Reads a report. None when it is not one: root in the sandbox can write what it likes into
    /// the supervisor's pipe.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let int = |at: usize| {
            i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let at_ns = u64::from_ne_bytes(*bytes[16..24].first_chunk()?);
        match (int(0), int(4), int(8)) {
            (1, pid, _) if pid > 1 => Some(Self::Made { pid }),
            (4, _, _) => Some(Self::Started),
            (2, stage, errno) => {
                let stages = [Stage::Fork, Stage::User, Stage::Chdir, Stage::Exec];
                let stage = stages.into_iter().find(|known| *known as i32 == stage)?;
                Some(Self::Failed { stage, errno })
            }
            (3, status, _) => Some(Self::Ended { status, at_ns }),
            _ => None,
        }
    }
}

/// Forks a supervisor that starts the command, reaps what it leaves behind while it runs, and
/// reports. Returns the supervisor's process id.
pub(crate) fn spawn(plan: &Plan<'_>) -> io::Result<i32> {
    let programs = pointers(plan.programs);
    let (argv, envp) = (pointers(plan.argv), pointers(plan.envp));
    let mut everything = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid for writes, and are initialised by the calls before they are read.
    let (before, nothing) = unsafe {
        libc::sigfillset(everything.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, everything.as_ptr(), before.as_mut_ptr());
        libc::sigemptyset(everything.as_mut_ptr());
        (before.assume_init(), everything.assume_init())
    };
    let mut command = Command {
        plan,
        programs: &programs[..plan.programs.len()],
        argv: argv.as_ptr(),
        envp: envp.as_ptr(),
        mask: nothing,
        failed: None,
    };
    // SAFETY: the child runs only `supervise`, which allocates nothing, takes no lock and never
    // returns. All signals are blocked, so no handler of this process runs in it.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        supervise(&mut command);
    }
    let error = io::Error::last_os_error();
    // SAFETY: `before` is the mask that pthread_sigmask wrote.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    if pid < 0 { Err(error) } else { Ok(pid) }
}

/// Reaps one child: `pid`, or any with -1. None when none has ended.
pub(crate) fn reap(pid: i32) -> io::Result<Option<i32>> {
    // SAFETY: a null status pointer is allowed.
    match unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) } {
        0 => Ok(None),
        reaped if reaped > 0 => Ok(Some(reaped)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Signals a process, or with a negative id a group. Whoever is gone already is no error.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: kill takes two integers.
    unsafe { libc::kill(pid, signal) };
}

/// Nanoseconds of the monotonic clock, which every process of the machine reads alike.
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

/// A random number, for names that nobody guesses.
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

/// Makes a process and reaps it: the least a kernel must be able to do.
pub fn self_test() -> io::Result<()> {
    let mut status = -1;
    // SAFETY: the child only ends; `status` is valid for writes.
    unsafe {
        match libc::fork() {
            0 => exit(),
            pid if pid > 0 && libc::waitpid(pid, &mut status, 0) == pid => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::other("the process did not end as it should"))
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

fn errno() -> c_int {
    // SAFETY: the location is this thread's and always valid.
    unsafe { *libc::__errno_location() }
}

/// The supervisor: the child of [`spawn`]'s fork. Keeps all signals blocked, so that only SIGKILL
/// and SIGSTOP reach it.
fn supervise(command: &mut Command<'_>) -> ! {
    let plan = command.plan;
    // SAFETY: async-signal-safe calls on integers only. Descriptors of the plan are all above
    // REPORT_FD (exec::spawn sees to it), so no dup overwrites one still needed.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        libc::dup2(plan.stdin.as_raw_fd(), 0);
        libc::dup2(plan.stdout.as_raw_fd(), 1);
        libc::dup2(plan.stderr.as_raw_fd(), 2);
        libc::dup3(plan.report.as_raw_fd(), REPORT_FD, libc::O_CLOEXEC);
        close_from(4, LAST_FD);
    }
    let pid = start(command);
    // SAFETY: closes our copies of the command's standard streams, so that their other ends see
    // when the command and its children closed theirs.
    unsafe { close_from(0, 2) };
    match command.failed {
        Some((stage, errno)) => {
            report(Report::Failed { stage, errno });
            exit()
        }
        None => {
            report(Report::Started);
            wait_for(pid)
        }
    }
}

/// Makes the process of the command. It shares our memory and we sleep until it has executed the
/// program or ended, as with vfork: no page tables are copied, and it can tell us why it failed.
fn start(command: &mut Command<'_>) -> i32 {
    let mut stack = MaybeUninit::<[u128; STACK_BYTES / 16]>::uninit();
    let argument: *mut Command<'_> = command;
    // SAFETY: `run_command` gets a pointer that outlives it (we are suspended while it uses our
    // memory), and the top of a stack that nothing else uses, aligned to 16 bytes.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(1).cast::<c_void>();
        libc::clone(
            run_command,
            top,
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            argument.cast(),
        )
    };
    if pid < 0 {
        command.failed = Some((Stage::Fork, errno()));
    }
    pid
}

/// The command, until `execve`.
extern "C" fn run_command(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passed a valid, unaliased Command and sleeps until we are done with it.
    let command = unsafe { &mut *argument.cast::<Command<'_>>() };
    command.failed = Some(become_command(command));
    // SAFETY: ends this process without running handlers of the one we share memory with.
    unsafe { libc::_exit(127) }
}

/// Returns only with why it failed.
fn become_command(command: &Command<'_>) -> (Stage, c_int) {
    let plan = command.plan;
    // SAFETY: async-signal-safe calls; every pointer is of a NUL-terminated string or array that
    // the plan keeps alive. Raw set*id calls: glibc's would signal threads that do not exist here.
    unsafe {
        report(Report::Made {
            pid: libc::setsid(),
        });
        for signal in plan.signals {
            sigaction(*signal, &KernelAction::default(), std::ptr::null_mut());
        }
        if let Some((rlim_cur, rlim_max)) = plan.nofile {
            libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur, rlim_max });
        }
        if let Some(user) = plan.user {
            let groups =
                libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr());
            if groups != 0
                || libc::syscall(libc::SYS_setresgid, user.gid, user.gid, user.gid) != 0
                || libc::syscall(libc::SYS_setresuid, user.uid, user.uid, user.uid) != 0
            {
                return (Stage::User, errno());
            }
        }
        // After set*id, which clears it. A command does not outlive a killed supervisor.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if libc::chdir(plan.cwd.as_ptr()) != 0 {
            return (Stage::Chdir, errno());
        }
        libc::sigprocmask(libc::SIG_SETMASK, &command.mask, std::ptr::null_mut());
        // As execvp: a directory of PATH without the program is passed over, one with a program
        // that may not be run is remembered.
        let mut error = libc::ENOENT;
        for program in command.programs {
            libc::execve(*program, command.argv, command.envp);
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => error = libc::EACCES,
                other => return (Stage::Exec, other),
            }
        }
        (Stage::Exec, error)
    }
}

/// Reaps until the command has ended. What it leaves behind goes to PID 1 as we exit.
fn wait_for(command: i32) -> ! {
    loop {
        let mut status = 0;
        // SAFETY: `status` is valid for writes.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::__WALL) };
        if pid == command {
            report(Report::Ended {
                status,
                at_ns: monotonic_ns(),
            });
            exit();
        }
        if pid < 0 && errno() != libc::EINTR {
            exit();
        }
    }
}

fn report(report: Report) {
    let bytes = report.encode();
    // SAFETY: the buffer is valid for its length.
    unsafe { libc::write(REPORT_FD, bytes.as_ptr().cast(), bytes.len()) };
}

fn exit() -> ! {
    // SAFETY: ends the supervisor, a copy of the guest, without running the guest's exit handlers.
    unsafe { libc::_exit(0) }
}

/// The kernel's `struct sigaction` on 64-bit machines: handler, flags, restorer, mask. Zeroes are
/// the default disposition.
#[derive(Default)]
#[repr(C)]
struct KernelAction([u64; 4]);

/// Past glibc, which hides two signals that a parent can well have ignored.
///
/// # Safety
/// `new` and `old` are null or valid.
unsafe fn sigaction(signal: c_int, new: *const KernelAction, old: *mut KernelAction) {
    // SAFETY: the caller vouches for the pointers; 8 is the size of the kernel's signal set.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, new, old, 8usize) };
}

/// # Safety
/// The caller no longer uses any descriptor of the range.
unsafe fn close_from(first: u32, last: u32) {
    // SAFETY: integers only; the caller vouches for the range.
    unsafe {
        if libc::syscall(libc::SYS_close_range, first, last, 0) != 0 {
            for fd in first..=last.min(FDS_MAX) {
                libc::close(fd as c_int);
            }
        }
    }
}
