//! A supervisor and its command until `execve`: processes of their own that run in the guest's
//! memory. Copying that (`fork`) would cost most of starting a command, above all where the kernel
//! is gVisor's. A supervisor may be made before there is a command for it: it sleeps until it is told.
//!
//! # Rules for code that runs in them
//! - It allocates nothing, takes no lock and touches only its [`Job`] and its own stack: the guest
//!   goes on meanwhile, in the same memory.
//! - It makes system calls by itself: those of libc write `errno`, which is the guest's.
//! - It is done with the memory when the kernel says so: a job is freed once its supervisor is
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

/// Below a stack: running over its end is a fault, not somebody else's memory.
const GUARD_BYTES: usize = 64 * 1024;

/// What a command gets: far above the guest's 0, below what marks a process as the first to go.
const OOM_SCORE: &[u8] = b"500";

/// What a supervisor is made with.
pub(crate) struct Plan<'a> {
    /// What to run; none when it is told [later](Orders::give).
    pub(crate) command: Option<&'a Arc<Command>>,
    /// Standard input of the command. All descriptors are above [`REPORT_FD`].
    pub(crate) stdin: BorrowedFd<'a>,
    /// Its standard output.
    pub(crate) stdout: BorrowedFd<'a>,
    /// Its standard error.
    pub(crate) stderr: BorrowedFd<'a>,
    /// Whether those are a terminal, which becomes that of its session.
    pub(crate) terminal: bool,
    /// Where the supervisor reports.
    pub(crate) report: BorrowedFd<'a>,
    /// Signals that are not at their default here.
    pub(crate) signals: &'a Arc<[c_int]>,
    /// Limit of open files (soft, hard) that the command gets back.
    pub(crate) nofile: Option<(u64, u64)>,
    /// Where the command says its process id, before anything else: by the time its supervisor
    /// could, the command may have killed it.
    pub(crate) pid: &'a Arc<AtomicI32>,
}

/// The memory that a supervisor and its command use. Dropped once the supervisor is reaped.
#[derive(Debug)]
pub(crate) struct Loan {
    // Taken out when it can never be freed.
    job: Option<Arc<Job>>,
    stack: Stack,
}

/// What a supervisor is told while it lives, and what it is asked.
#[derive(Debug)]
pub(crate) struct Orders(Arc<Job>);

/// A plan, with everything as the kernel wants it.
#[derive(Debug)]
struct Job {
    /// What to run. Set once, before `ordered`.
    order: OnceLock<Order>,
    /// Not zero once there is an order: what a supervisor without one sleeps on.
    ordered: AtomicU32,
    /// Whether the command runs its program, and whether somebody wants to be told.
    news: AtomicU32,
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
    /// Whether the command runs on its supervisor's stack.
    starting: AtomicBool,
}

/// A command, with everything as the kernel wants it.
#[derive(Debug)]
struct Order {
    command: Arc<Command>,
    programs: Vec<*const c_char>,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    /// Whether the command runs as somebody else than we do.
    other_user: bool,
}

/// Values of [`Job::news`]: nothing yet, nothing yet and it is waited for, it runs.
const NO_NEWS: u32 = 0;
const NEWS_WANTED: u32 = 1;
const RUNS: u32 = 2;

#[derive(Debug)]
struct Stack(*mut c_void);

/// Stacks for supervisors to come: mapping and unmapping in memory that several processes share
/// interrupts every CPU.
static SPARE: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

/// As many as commands often run at once.
const SPARE_STACKS_MAX: usize = 4;

// === impl Loan ===

// SAFETY: a stack is an address range that nobody runs on while it is held.
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
            // Its command is still here, and nobody can say for how long.
            std::mem::forget(self.job.take());
            self.stack.0 = std::ptr::null_mut();
        }
    }
}

// === impl Orders ===

impl Orders {
    /// Tells the supervisor what to run. Once.
    pub(crate) fn give(&self, command: &Arc<Command>) {
        if self.0.order.set(Order::new(command)).is_err() {
            return;
        }
        self.0.ordered.store(1, Ordering::Release);
        let at = self.0.ordered.as_ptr() as usize;
        // SAFETY: the address is valid; the call only wakes who sleeps on it.
        let _ = unsafe { call(libc::SYS_futex, [at, FUTEX_WAKE, 1, 0]) };
    }

    /// Whether the command runs its program. If not, the supervisor will report when it does.
    pub(crate) fn runs(&self) -> bool {
        let asked =
            self.0
                .news
                .compare_exchange(NO_NEWS, NEWS_WANTED, Ordering::AcqRel, Ordering::Acquire);
        asked == Err(RUNS)
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
            // Who has a terminal waits for it.
            news: AtomicU32::new(if plan.terminal { NEWS_WANTED } else { NO_NEWS }),
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
    /// One that was used before, or a new one.
    fn take() -> io::Result<Self> {
        let spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(Self::new, Ok)
    }

    fn new() -> io::Result<Self> {
        let bytes = GUARD_BYTES + STACK_BYTES;
        // SAFETY: a new private mapping at an address of the kernel's choice, whose lower part is
        // then taken from everybody.
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
        // SAFETY: the mapping is ours and, as the loan says, nobody runs on it any more.
        let _ = unsafe { rustix::mm::munmap(self.0, GUARD_BYTES + STACK_BYTES) };
    }
}

/// Makes a supervisor that starts the command, reaps what it leaves behind while it runs, and
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
        // Without a signal at its end, which its report tells better.
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
        // Had the guest died before that, nobody would tell us, and nobody ever give an order.
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
        // Here and not in the command, which gets them as they are: there may be time now. All are
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
            // We lead the session and stay out of its foreground.
            let _ = call(libc::SYS_setsid, [0; 4]);
            let _ = call(libc::SYS_ioctl, [0, libc::TIOCSCTTY as usize, 0, 0]);
        }
    }
    await_order(job);
    let made = start(job);
    // SAFETY: closes our copy of the command's input, so that who writes to it sees when nobody
    // reads. A terminal we go on to ask, of which one copy is enough.
    unsafe {
        match job.terminal {
            true => close(1, 2),
            false => close(0, 0),
        }
    }
    // SAFETY: the command is gone from our memory, or never was: nobody writes this any more.
    let failed = unsafe { *job.failed.get() };
    match (made, failed) {
        (Ok(command), None) => {
            if job.news.swap(RUNS, Ordering::AcqRel) == NEWS_WANTED {
                report(Report::Started);
            }
            prefer_to_oom_kill(command);
            if job.terminal {
                attend(command)
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

/// Sleeps until there is an order.
fn await_order(job: &Job) {
    while job.ordered.load(Ordering::Acquire) == 0 {
        let at = job.ordered.as_ptr() as usize;
        // SAFETY: the address is valid. The call returns at once when there is an order by now.
        let _ = unsafe { call(libc::SYS_futex, [at, FUTEX_WAIT, 0, 0]) };
    }
}

/// Makes the kernel end the command, and what it will start, before the guest. Not by itself before
/// it has executed its program: until then it is a copy of the guest, whose files in /proc are the
/// host's. Failing is fine: then the kernel chooses by size.
fn prefer_to_oom_kill(command: i32) {
    let mut path = *b"/proc/0000000000/oom_score_adj\0";
    // The kernel takes no number with a zero before it.
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
    // Whoever may mount something else there shall not have us wait for it.
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

/// Makes the process of the command. We sleep until it has executed the program or ended, as with
/// vfork: it runs on our stack, and can tell us why it failed.
fn start(job: &Job) -> Result<i32, c_int> {
    let mut stack = MaybeUninit::<[u128; COMMAND_STACK_BYTES / 16]>::uninit();
    job.starting.store(true, Ordering::Release);
    // SAFETY: the job outlives the child (we sleep meanwhile; and who kills us in our sleep keeps it
    // from being freed), which gets the top of a stack that nothing else uses, aligned to 16 bytes.
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
    // SAFETY: nobody reads it before we are gone.
    unsafe { *job.failed.get() = Some(failed) };
    exit(127)
}

/// Returns only with why it failed.
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

/// Makes this process a group of its own, the one in the foreground of the terminal at descriptor 0.
/// Who is in the background and asks for that is stopped, unless it ignores being told so.
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
        let told = libc::SIGTTOU as usize;
        let (ignored, default) = ((&raw const ignored) as usize, (&raw const default) as usize);
        let _ = call(libc::SYS_rt_sigaction, [told, ignored, 0, SIGNAL_SET_BYTES]);
        let group = pid.as_ptr() as usize;
        let _ = call(libc::SYS_ioctl, [0, libc::TIOCSPGRP as usize, group, 0]);
        let _ = call(libc::SYS_rt_sigaction, [told, default, 0, SIGNAL_SET_BYTES]);
    }
    pid.get()
}

/// As [`wait_for`], and when the guest asks with SIGUSR1 says which group is in the foreground.
fn attend(command: i32) -> ! {
    const BIT: u64 = 1;
    let wanted = BIT << (libc::SIGCHLD - 1) | BIT << (libc::SIGUSR1 - 1);
    // Should a signal get lost.
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

/// Reaps until the command has ended. What it leaves behind goes to PID 1 as we exit.
fn wait_for(command: i32) -> ! {
    loop {
        reap(command, 0);
    }
}

/// Reaps one; false when none has ended. Does not come back from the end of the command.
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

/// Reports, and ends. Our copies of the command's output are closed just before: its other ends
/// then see that nobody writes any more, and the guest is woken once by both.
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

/// Ends this process alone, without any handler of the guest's.
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

/// Operations of `futex`, between processes that share memory: that is what _PRIVATE is about.
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
