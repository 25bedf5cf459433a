//! A supervisor and its command until `execve`: processes that share the guest's memory (`CLONE_VM`, as in vfork).
//! Copying the memory (`fork`) would be most of the cost of starting a command, above all with gVisor's
//! kernel. A supervisor may be pre-forked: it sleeps on a futex until it gets a command.
//!
//! # Rules for code that runs in them
//! - It allocates nothing, takes no lock and touches only its [`Job`] and its own stack: the guest
//!   runs meanwhile, in the same memory.
//! - It makes system calls by itself: those of libc write `errno`, which is the guest's.
//! - It uses the memory until the kernel ends it: a job is freed once its supervisor is
//!   reaped, or never, when the supervisor was killed while its command had yet to leave.
#![expect(
    unsafe_code,
    reason = "clone, raw system calls and memory shared between processes have no safe interface"
)]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the kernel reads of a register what it needs"
)]

use super::command::Command;
use super::raw::{call, clone};
use super::report::{Report, Stage};
use crate::sys::{FDS_MAX, KernelAction, LAST_FD, monotonic_ns};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use std::cell::UnsafeCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Descriptor on which the supervisor reports, after it moved it there.
const REPORT_FD: RawFd = 3;

/// Stack of the command between `clone` and `execve`; it makes a dozen shallow calls.
const COMMAND_STACK_BYTES: usize = 16 * 1024;

/// Stack of the supervisor, with its command's on it.
const STACK_BYTES: usize = 2 * COMMAND_STACK_BYTES;

/// Guard page below a stack: an overflow is a fault and does not overwrite other memory.
const GUARD_BYTES: usize = 64 * 1024;

/// oom_score_adj of a command: far above the guest's 0, below the maximum.
const OOM_SCORE: &[u8] = b"500";

/// Parameters of a supervisor.
pub(crate) struct Plan<'a> {
    /// The command; none for a spare, which gets it [later](Orders::give).
    pub(crate) command: Option<&'a Arc<Command>>,
    /// Standard input of the command. All descriptors are above [`REPORT_FD`].
    pub(crate) stdin: BorrowedFd<'a>,
    /// Its standard output.
    pub(crate) stdout: BorrowedFd<'a>,
    /// Its standard error.
    pub(crate) stderr: BorrowedFd<'a>,
    /// Whether those are a terminal, which becomes the controlling terminal of its session.
    pub(crate) terminal: bool,
    /// Pipe for the supervisor's reports.
    pub(crate) report: BorrowedFd<'a>,
    /// Signals whose disposition here is not the default.
    pub(crate) signals: &'a Arc<[c_int]>,
    /// Limit of open files (soft, hard) that is restored for the command.
    pub(crate) nofile: Option<(u64, u64)>,
    /// Where the command stores its process id, before anything else: by the time its supervisor
    /// could, the command may have killed it.
    pub(crate) pid: &'a Arc<AtomicI32>,
}

/// The memory that a supervisor and its command use. Dropped once the supervisor is reaped.
#[derive(Debug)]
pub(crate) struct Loan {
    // Leaked (never freed) when a killed supervisor's command may still use it.
    job: Option<Arc<Job>>,
    stack: Stack,
}

/// Requests to a live supervisor: the command to start, and its state.
#[derive(Debug)]
pub(crate) struct Orders(Arc<Job>);

/// A plan in the form that system calls need.
#[derive(Debug)]
struct Job {
    /// The command. Set once, before `ordered`.
    order: OnceLock<Order>,
    /// Futex: not zero once there is a command.
    ordered: AtomicU32,
    /// Whether the command has executed its program, and whether the guest waits for that.
    start_state: AtomicU32,
    streams: [RawFd; 3],
    terminal: bool,
    report: RawFd,
    signals: Arc<[c_int]>,
    nofile: Option<libc::rlimit64>,
    /// Process id of the guest.
    guest: u32,
    pid: Arc<AtomicI32>,
    /// Why the command did not start. Written by the command, read by the supervisor once that is over.
    failed: UnsafeCell<Option<(Stage, c_int)>>,
    /// Whether the command still runs on its supervisor's stack.
    starting: AtomicBool,
}

/// A command in the form that system calls need.
#[derive(Debug)]
struct Order {
    command: Arc<Command>,
    programs: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    /// Whether the command runs as another user than the guest.
    other_user: bool,
}

/// Values of [`Job::start_state`]: not started, not started and the guest waits for it, started.
const NOT_STARTED: u32 = 0;
const NOT_STARTED_WAITED: u32 = 1;
const STARTED: u32 = 2;

#[derive(Debug)]
struct Stack(*mut c_void);

/// Pool of stacks for supervisors: mapping and unmapping in memory that several processes share
/// interrupts every CPU.
static SPARE: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

/// As many stacks as commands often run concurrently.
const SPARE_STACKS_MAX: usize = 4;

// === impl Loan ===

// SAFETY: a stack is an address range that no process runs on while it is held.
unsafe impl Send for Stack {}

// SAFETY: the pointers of an order are into its own command, which never changes and is not freed
// before it.
unsafe impl Send for Order {}
// SAFETY: as above; nothing of an order changes.
unsafe impl Sync for Order {}
// SAFETY: `failed` is written by a command and read by its supervisor afterwards, never here;
// everything else is atomic or does not change.
unsafe impl Sync for Job {}

impl Drop for Loan {
    fn drop(&mut self) {
        let starting = |job: &Job| job.starting.load(Ordering::Acquire);
        if self.job.as_deref().is_some_and(starting) {
            // Its command still runs in this memory, for an unknown time.
            std::mem::forget(self.job.take());
            self.stack.0 = std::ptr::null_mut();
        }
    }
}

// === impl Orders ===

impl Orders {
    /// Gives the supervisor its command. Once.
    pub(crate) fn give(&self, command: &Arc<Command>) {
        if self.0.order.set(Order::new(command)).is_err() {
            return;
        }
        self.0.ordered.store(1, Ordering::Release);
        let at = self.0.ordered.as_ptr() as usize;
        // SAFETY: the address is valid; the call only wakes waiters of the futex.
        let _ = unsafe { call(libc::SYS_futex, [at, FUTEX_WAKE, 1, 0]) };
    }

    /// Whether the command has executed its program. If not, the supervisor will report when it has.
    pub(crate) fn runs(&self) -> bool {
        let asked = self.0.start_state.compare_exchange(
            NOT_STARTED,
            NOT_STARTED_WAITED,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        asked == Err(STARTED)
    }
}

// === impl Order ===

impl Order {
    fn new(command: &Arc<Command>) -> Self {
        let uid = command.user.uid;
        Self {
            programs: pointers(&command.programs),
            argv: pointers(&command.argv),
            envp: pointers(&command.envp),
            other_user: uid != 0 && uid != rustix::process::geteuid().as_raw(),
            command: Arc::clone(command),
        }
    }
}

// === impl Job ===

impl Job {
    fn new(plan: &Plan<'_>) -> Self {
        let order = plan.command.map(Order::new);
        Self {
            ordered: AtomicU32::new(order.is_some().into()),
            order: order.map_or_else(OnceLock::new, OnceLock::from),
            // With a terminal the guest waits for the start.
            start_state: AtomicU32::new(if plan.terminal {
                NOT_STARTED_WAITED
            } else {
                NOT_STARTED
            }),
            streams: [plan.stdin, plan.stdout, plan.stderr].map(|fd| fd.as_raw_fd()),
            terminal: plan.terminal,
            report: plan.report.as_raw_fd(),
            signals: Arc::clone(plan.signals),
            nofile: plan
                .nofile
                .map(|(rlim_cur, rlim_max)| libc::rlimit64 { rlim_cur, rlim_max }),
            guest: std::process::id(),
            pid: Arc::clone(plan.pid),
            failed: UnsafeCell::new(None),
            starting: AtomicBool::new(false),
        }
    }
}

// === impl Stack ===

impl Stack {
    /// A stack from the pool, or a new one.
    fn take() -> io::Result<Self> {
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(Self::new, Ok)
    }

    fn new() -> io::Result<Self> {
        let bytes = GUARD_BYTES + STACK_BYTES;
        // SAFETY: a new private mapping at an address of the kernel's choice, whose lower part is
        // then made a guard page (PROT_NONE).
        unsafe {
            let at = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?;
            let stack = Self(at);
            rustix::mm::mprotect(at, GUARD_BYTES, MprotectFlags::empty())?;
            Ok(stack)
        }
    }

    fn top(&self) -> *mut c_void {
        self.0.wrapping_byte_add(GUARD_BYTES + STACK_BYTES)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if self.0.is_null() {
            return;
        }
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE_STACKS_MAX {
            spare.push(Self(self.0));
            return;
        }
        // SAFETY: the mapping is ours and, by the contract of `Loan`, no process runs on it any more.
        let _ = unsafe { rustix::mm::munmap(self.0, GUARD_BYTES + STACK_BYTES) };
    }
}

/// Makes a supervisor that starts the command, reaps orphans of it while it runs, and
/// reports. Returns its process id, what must be kept until it is reaped, and how to speak to it.
pub(crate) fn spawn(plan: &Plan<'_>) -> io::Result<(i32, Loan, Orders)> {
    let stack = Stack::take()?;
    let job = Arc::new(Job::new(plan));
    let mut before = 0u64;
    let argument: *const Job = Arc::as_ptr(&job);
    // SAFETY: the masks are as long as the kernel's, and the one before is put back. All signals
    // are blocked in the child, so no handler of this process runs in it. It gets a stack that
    // nothing else uses, aligned to 16 bytes, and a job that both outlive it (see `Loan`).
    let pid = unsafe {
        set_signal_mask(u64::MAX, &mut before);
        // Without a signal at its end: it sends a report instead.
        let pid = clone(libc::CLONE_VM, stack.top(), supervise, argument);
        set_signal_mask(before, std::ptr::null_mut());
        pid.map_err(io::Error::from_raw_os_error)?
    };
    let orders = Orders(Arc::clone(&job));
    let job = Some(job);
    Ok((pid, Loan { job, stack }, orders))
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    let null = [std::ptr::null()];
    strings.iter().map(|s| s.as_ptr()).chain(null).collect()
}

/// The supervisor. Keeps all signals blocked, so that only SIGKILL and SIGSTOP reach it.
extern "C" fn supervise(job: *const Job) -> ! {
    // SAFETY: `spawn` passed a valid job, which lives as long as we do.
    let job = unsafe { &*job };
    // SAFETY: integers only. Descriptors of the job are all above REPORT_FD (exec::spawn sees to
    // it), so no dup overwrites one still needed, and this table of descriptors is ours alone.
    unsafe {
        let _ = call(
            libc::SYS_prctl,
            [
                libc::PR_SET_PDEATHSIG as usize,
                libc::SIGKILL as usize,
                0,
                0,
            ],
        );
        // Had the guest died before PDEATHSIG was set, neither a signal nor a command would ever come.
        if call(libc::SYS_getppid, [0; 4]) != Ok(job.guest as usize) {
            exit(0);
        }
        let _ = call(
            libc::SYS_prctl,
            [libc::PR_SET_CHILD_SUBREAPER as usize, 1, 0, 0],
        );
        for (to, from) in job.streams.into_iter().enumerate() {
            let _ = call(libc::SYS_dup3, [from as usize, to, 0, 0]);
        }
        let cloexec = libc::O_CLOEXEC as usize;
        let _ = call(
            libc::SYS_dup3,
            [job.report as usize, REPORT_FD as usize, cloexec, 0],
        );
        close(REPORT_FD as u32 + 1, LAST_FD);
        // Dispositions are reset here and inherited by the command: a spare has time for it. All signals are
        // blocked here.
        for signal in &*job.signals {
            let default = KernelAction::default();
            let action = (&raw const default) as usize;
            let _ = call(
                libc::SYS_rt_sigaction,
                [*signal as usize, action, 0, SIGNAL_SET_BYTES],
            );
        }
        if job.terminal {
            // The supervisor leads the session and is a background process.
            let _ = call(libc::SYS_setsid, [0; 4]);
            let _ = call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0, 0]);
        }
    }
    await_order(job);
    let made = start(job);
    // SAFETY: closes our copy of the command's input, so that its writer gets EPIPE when the command has
    // closed it. A terminal stays open for queries, of which one copy is enough.
    unsafe {
        match job.terminal {
            true => close(1, 2),
            false => close(0, 0),
        }
    }
    // SAFETY: the command has left our memory, or never was in it: no process writes this any more.
    let failed = unsafe { *job.failed.get() };
    match (made, failed) {
        (Ok(command), None) => {
            if job.start_state.swap(STARTED, Ordering::AcqRel) == NOT_STARTED_WAITED {
                report(Report::Started);
            }
            prefer_to_oom_kill(command);
            if job.terminal {
                wait_on_terminal(command)
            }
            wait_for(command)
        }
        (Err(errno), _) => last_report(Report::Failed {
            stage: Stage::Fork,
            errno,
        }),
        (Ok(_), Some((stage, errno))) => last_report(Report::Failed { stage, errno }),
    }
}

/// Sleeps on the futex until there is a command.
fn await_order(job: &Job) {
    while job.ordered.load(Ordering::Acquire) == 0 {
        let at = job.ordered.as_ptr() as usize;
        // SAFETY: the address is valid. The call returns at once when there is an order by now.
        let _ = unsafe { call(libc::SYS_futex, [at, FUTEX_WAIT, 0, 0]) };
    }
}

/// Sets oom_score_adj of the command, so that the OOM killer chooses it and its children before the guest.
/// The supervisor does this after execve: until then the command is a copy of the guest, whose files in /proc
/// belong to the host's root. Errors are ignored: then the kernel chooses by size.
fn prefer_to_oom_kill(command: i32) {
    let mut path = *b"/proc/0000000000/oom_score_adj\0";
    // The kernel takes no number with a leading zero.
    let mut at = 16;
    let mut rest = command.unsigned_abs();
    loop {
        at -= 1;
        path[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    at -= 6;
    path.copy_within(..6, at);
    // A path that a process inside may have mounted over must not block us.
    let flags = (libc::O_WRONLY | libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: the path ends with a zero, and the score is valid for its length.
    unsafe {
        let path = path.as_ptr().add(at) as usize;
        let here = libc::AT_FDCWD as usize;
        if let Ok(file) = call(libc::SYS_openat, [here, path, flags, 0]) {
            let score = OOM_SCORE.as_ptr() as usize;
            let _ = call(libc::SYS_write, [file, score, OOM_SCORE.len(), 0]);
            let _ = call(libc::SYS_close, [file, 0, 0, 0]);
        }
    }
}

/// Clones the process of the command. The supervisor sleeps until it has executed the program or exited, as with
/// vfork: it runs on the supervisor's stack, and can store its error there.
fn start(job: &Job) -> Result<i32, c_int> {
    let mut stack = MaybeUninit::<[u128; COMMAND_STACK_BYTES / 16]>::uninit();
    job.starting.store(true, Ordering::Release);
    // SAFETY: the job outlives the child (we sleep meanwhile; if we are killed in our sleep, it is never
    // freed), which gets the top of a stack that nothing else uses, aligned to 16 bytes.
    let made = unsafe {
        let top = stack.as_mut_ptr().add(1).cast::<c_void>();
        let flags = libc::SIGCHLD | libc::CLONE_VM | libc::CLONE_VFORK;
        clone(flags, top, run_command, job)
    };
    job.starting.store(false, Ordering::Release);
    made
}

/// The command, until `execve`.
extern "C" fn run_command(job: *const Job) -> ! {
    // SAFETY: `start` passed a valid job and sleeps until we are done with it.
    let job = unsafe { &*job };
    let failed = match job.order.get() {
        Some(order) => become_command(job, order),
        None => (Stage::Exec, libc::EINVAL),
    };
    // SAFETY: the supervisor reads it only after this process has exited.
    unsafe { *job.failed.get() = Some(failed) };
    exit(127)
}

/// Returns only on failure.
fn become_command(job: &Job, order: &Order) -> (Stage, c_int) {
    let command = &order.command;
    // SAFETY: every pointer is of a value, or a NUL-terminated string or array, that the job keeps
    // alive.
    unsafe {
        let pid = if job.terminal {
            take_foreground()
        } else {
            call(libc::SYS_setsid, [0; 4]).unwrap_or(0) as i32
        };
        job.pid.store(pid, Ordering::Release);
        if let Some(limit) = &job.nofile {
            let limit = std::ptr::from_ref(limit) as usize;
            let _ = call(
                libc::SYS_prlimit64,
                [0, libc::RLIMIT_NOFILE as usize, limit, 0],
            );
        }
        let user = &command.user;
        if order.other_user {
            let (uid, gid) = (user.uid as usize, user.gid as usize);
            let groups = [user.groups.len(), user.groups.as_ptr() as usize, 0, 0];
            let ids = call(libc::SYS_setgroups, groups)
                .and_then(|_| call(libc::SYS_setresgid, [gid, gid, gid, 0]))
                .and_then(|_| call(libc::SYS_setresuid, [uid, uid, uid, 0]));
            if let Err(errno) = ids {
                return (Stage::User, errno);
            }
        }
        // After set*id, which clears it. A command does not outlive a killed supervisor.
        let _ = call(
            libc::SYS_prctl,
            [
                libc::PR_SET_PDEATHSIG as usize,
                libc::SIGKILL as usize,
                0,
                0,
            ],
        );
        if let Err(errno) = call(libc::SYS_chdir, [command.cwd.as_ptr() as usize, 0, 0, 0]) {
            return (Stage::Chdir, errno);
        }
        set_signal_mask(0, std::ptr::null_mut());
        // As execvp: a directory of PATH without the program is passed over, one with a program
        // that may not be run is remembered.
        let mut error = libc::ENOENT;
        let (argv, envp) = (order.argv.as_ptr() as usize, order.envp.as_ptr() as usize);
        for program in order
            .programs
            .iter()
            .take_while(|program| !program.is_null())
        {
            match call(libc::SYS_execve, [*program as usize, argv, envp, 0]) {
                Err(libc::ENOENT | libc::ENOTDIR) | Ok(_) => {}
                Err(libc::EACCES) => error = libc::EACCES,
                Err(other) => return (Stage::Exec, other),
            }
        }
        (Stage::Exec, error)
    }
}

/// Makes this process a new process group, the foreground group of the terminal at descriptor 0.
/// tcsetpgrp from the background stops the caller by SIGTTOU, unless that is ignored.
///
/// # Safety
/// Descriptor 0 is a terminal that this session has.
unsafe fn take_foreground() -> i32 {
    let pid = std::cell::Cell::new(0i32);
    // SAFETY: the pointers are of values on this stack; the caller vouches for the descriptor.
    unsafe {
        pid.set(call(libc::SYS_getpid, [0; 4]).unwrap_or(0) as i32);
        let _ = call(libc::SYS_setpgid, [0; 4]);
        let [ignored, default] = [KernelAction::ignore(), KernelAction::default()];
        let sigttou = libc::SIGTTOU as usize;
        let (ignored, default) = ((&raw const ignored) as usize, (&raw const default) as usize);
        let _ = call(
            libc::SYS_rt_sigaction,
            [sigttou, ignored, 0, SIGNAL_SET_BYTES],
        );
        let group = pid.as_ptr() as usize;
        let _ = call(libc::SYS_ioctl, [0, libc::TIOCSPGRP as usize, group, 0]);
        let _ = call(
            libc::SYS_rt_sigaction,
            [sigttou, default, 0, SIGNAL_SET_BYTES],
        );
    }
    pid.get()
}

/// As [`wait_for`], and reports the foreground process group when the guest asks with SIGUSR1.
fn wait_on_terminal(command: i32) -> ! {
    const BIT: u64 = 1;
    let wanted = BIT << (libc::SIGCHLD - 1) | BIT << (libc::SIGUSR1 - 1);
    // Poll interval, should a signal be lost.
    let look_every = libc::timespec {
        tv_sec: 5,
        tv_nsec: 0,
    };
    loop {
        while reap(command, libc::WNOHANG) {}
        let (wanted, time) = (
            (&raw const wanted) as usize,
            (&raw const look_every) as usize,
        );
        // SAFETY: the set and the time are valid, and all signals are blocked.
        let signal = unsafe {
            call(
                libc::SYS_rt_sigtimedwait,
                [wanted, 0, time, SIGNAL_SET_BYTES],
            )
        };
        if signal == Ok(libc::SIGUSR1 as usize) {
            let mut group: i32 = 0;
            let at = (&raw mut group) as usize;
            // SAFETY: `group` is valid for writes.
            let _ = unsafe { call(libc::SYS_ioctl, [0, libc::TIOCGPGRP as usize, at, 0]) };
            report(Report::Foreground { group });
        }
    }
}

/// Reaps until the command has exited. Its orphans are reparented to PID 1 when the supervisor exits.
fn wait_for(command: i32) -> ! {
    loop {
        reap(command, 0);
    }
}

/// Reaps one child; false when none has exited. Does not return at the end of the command.
fn reap(command: i32, flags: c_int) -> bool {
    let mut status: c_int = 0;
    let at = (&raw mut status) as usize;
    let flags = (flags | libc::__WALL) as usize;
    // SAFETY: `status` is valid for writes.
    let pid = unsafe { call(libc::SYS_wait4, [-1isize as usize, at, flags, 0]) };
    match pid {
        Ok(pid) if pid as i32 == command => {
            let at_ns = monotonic_ns();
            last_report(Report::Ended { status, at_ns })
        }
        Ok(pid) => pid != 0,
        Err(libc::EINTR) => true,
        Err(_) => exit(0),
    }
}

/// Sends the last report, and exits. Our copies of the command's output are closed just before: the guest
/// then sees end of file, and is woken once by both.
fn last_report(last: Report) -> ! {
    // SAFETY: we write to none of them.
    unsafe { close(1, 2) };
    report(last);
    exit(0)
}

fn report(report: Report) {
    let bytes = report.encode();
    // SAFETY: the buffer is valid for its length.
    let _ = unsafe {
        call(
            libc::SYS_write,
            [REPORT_FD as usize, bytes.as_ptr() as usize, bytes.len(), 0],
        )
    };
}

/// `_exit`: no handler of the guest runs.
fn exit(code: usize) -> ! {
    loop {
        // SAFETY: an integer only.
        let _ = unsafe { call(libc::SYS_exit_group, [code, 0, 0, 0]) };
    }
}

/// # Safety
/// The caller no longer uses any descriptor of the range.
unsafe fn close(first: u32, last: u32) {
    // SAFETY: integers only; the caller vouches for the range.
    unsafe {
        if call(libc::SYS_close_range, [first as usize, last as usize, 0, 0]).is_err() {
            for fd in first..=last.min(FDS_MAX) {
                let _ = call(libc::SYS_close, [fd as usize, 0, 0, 0]);
            }
        }
    }
}

/// Futex operations without _PRIVATE: several processes use it.
const FUTEX_WAIT: usize = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
const FUTEX_WAKE: usize = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;

/// Bytes of the kernel's signal set.
const SIGNAL_SET_BYTES: usize = 8;

/// # Safety
/// `before` is null or valid for writes.
unsafe fn set_signal_mask(mask: u64, before: *mut u64) {
    let (how, mask) = (libc::SIG_SETMASK as usize, (&raw const mask) as usize);
    // SAFETY: `mask` is as long as the kernel's; the caller vouches for `before`.
    let _ = unsafe {
        call(
            libc::SYS_rt_sigprocmask,
            [how, mask, before as usize, SIGNAL_SET_BYTES],
        )
    };
}
