//! Makes system calls as another process, by `ptrace`: what code that took it over could do.
#![expect(unsafe_code, reason = "ptrace and pidfd_getfd have no safe wrapper")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr::null_mut;

/// Below the stack pointer, past what the interrupted function may use there.
const SCRATCH_BELOW_STACK: u64 = 64 * 1024;

/// `syscall`.
const INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// The main thread of a process that was stopped. Dropping it lets it go on as if nothing had been.
#[derive(Debug)]
pub(crate) struct Hijacked {
    pid: libc::pid_t,
    before: libc::user_regs_struct,
    memory: File,
    scratch: std::cell::Cell<u64>,
}

// === impl Hijacked ===

impl Hijacked {
    /// Stops the process where it is.
    pub(crate) fn stop(pid: u32) -> io::Result<Self> {
        let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
        // SAFETY: these requests take no pointer.
        unsafe {
            check(libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0))?;
            check(libc::ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0))?;
        }
        wait(pid)?;
        let before = registers(pid)?;
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let scratch = std::cell::Cell::new(before.rsp - SCRATCH_BELOW_STACK);
        Ok(Self {
            pid,
            before,
            memory,
            scratch,
        })
    }

    /// Puts bytes into its memory; where they are. For a few hundred of them.
    pub(crate) fn put(&self, bytes: &[u8]) -> u64 {
        let at = self.scratch.get();
        self.memory.write_all_at(bytes, at).expect("its memory");
        self.scratch
            .set(at + (bytes.len() as u64).next_multiple_of(16));
        at
    }

    /// A path or name in its memory.
    pub(crate) fn string(&self, text: &str) -> u64 {
        self.put(&[text.as_bytes(), &[0]].concat())
    }

    /// Makes a system call as the process: what it returned, or the negative error.
    pub(crate) fn call(&self, number: i64, arguments: &[u64]) -> i64 {
        let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
        let mut registers_then = self.before;
        // A thread that waits stands behind the instruction by which it went into the kernel.
        let at = self.before.rip - INSTRUCTION.len() as u64;
        let mut there = [0; 2];
        self.memory.read_exact_at(&mut there, at).expect("its code");
        assert_eq!(there, INSTRUCTION, "it was not waiting in a system call");
        registers_then.rip = at;
        registers_then.rax = number.unsigned_abs();
        // No system call to be started again.
        registers_then.orig_rax = u64::MAX;
        registers_then.rdi = argument(0);
        registers_then.rsi = argument(1);
        registers_then.rdx = argument(2);
        registers_then.r10 = argument(3);
        registers_then.r8 = argument(4);
        registers_then.r9 = argument(5);
        set_registers(self.pid, &registers_then).expect("its registers");
        // SAFETY: takes no pointer.
        check(unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, 0) }).expect("a step");
        wait(self.pid).expect("it stops again");
        registers(self.pid)
            .expect("its registers")
            .rax
            .cast_signed()
    }
}

impl Drop for Hijacked {
    fn drop(&mut self) {
        let _ = set_registers(self.pid, &self.before);
        // SAFETY: takes no pointer.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.pid, 0, 0) };
    }
}

/// A copy of a descriptor of another process.
pub(crate) fn descriptor_of(pid: u32, descriptor: i32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    // SAFETY: takes numbers only.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), descriptor, 0) };
    check(copy)?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(copy).map_err(io::Error::other)?) })
}

fn registers(pid: libc::pid_t) -> io::Result<libc::user_regs_struct> {
    // SAFETY: plain data for which all zeroes is valid.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one such struct there.
    check(unsafe { libc::ptrace(libc::PTRACE_GETREGS, pid, 0, &raw mut registers) })?;
    Ok(registers)
}

fn set_registers(pid: libc::pid_t, registers: &libc::user_regs_struct) -> io::Result<()> {
    // SAFETY: the kernel reads one such struct there.
    check(unsafe { libc::ptrace(libc::PTRACE_SETREGS, pid, 0, registers) })
}

fn wait(pid: libc::pid_t) -> io::Result<()> {
    // SAFETY: no status is asked for.
    check(libc::c_long::from(unsafe {
        libc::waitpid(pid, null_mut(), libc::__WALL)
    }))
}

fn check(result: libc::c_long) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
