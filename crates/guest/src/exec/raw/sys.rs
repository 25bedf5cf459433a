//! System calls as the kernel takes them, past libc: those of libc write `errno`, and a `clone` that
//! runs on another stack has none.
#![expect(
    unsafe_code,
    reason = "clone and raw system calls have no safe interface"
)]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "the kernel reads of a register what it needs"
)]

use std::arch::asm;
use std::ffi::{c_int, c_long, c_void};

/// Makes a process that runs `run(job)`, which never returns, on another stack.
///
/// # Safety
/// `stack` is the top of one that nothing else uses, aligned to 16 bytes; it and `job` outlive the
/// process. `run` keeps the rules of `sys.rs`.
#[cfg(target_arch = "x86_64")]
pub(in crate::exec) unsafe fn clone<T>(
    flags: c_int,
    stack: *mut c_void,
    run: extern "C" fn(*const T) -> !,
    job: *const T,
) -> Result<i32, c_int> {
    let result: isize;
    // SAFETY: the child finds zero in rax, its own stack in rsp and the other registers as here,
    // and never comes back. To us it is a system call.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize,
            in("rsi") stack,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            in("r12") run,
            in("r13") job,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    outcome(result).map(|pid| pid as i32)
}

/// As on `x86_64`.
///
/// # Safety
/// As on `x86_64`.
#[cfg(target_arch = "aarch64")]
pub(in crate::exec) unsafe fn clone<T>(
    flags: c_int,
    stack: *mut c_void,
    run: extern "C" fn(*const T) -> !,
    job: *const T,
) -> Result<i32, c_int> {
    let result: isize;
    // SAFETY: the child finds zero in x0, its own stack in sp and the other registers as here, and
    // never comes back. To us it is a system call.
    unsafe {
        asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x22",
            "blr x21",
            "brk #1",
            "2:",
            inlateout("x0") flags as isize => result,
            in("x1") stack,
            in("x2") 0,
            in("x3") 0,
            in("x4") 0,
            in("x8") libc::SYS_clone,
            in("x21") run,
            in("x22") job,
        );
    }
    outcome(result).map(|pid| pid as i32)
}

/// A system call, past libc.
///
/// # Safety
/// As the system call's.
pub(in crate::exec) unsafe fn call(number: c_long, arguments: [usize; 4]) -> Result<usize, c_int> {
    let [a, b, c, d] = arguments;
    let result: isize;
    // SAFETY: the kernel keeps all registers but those named; the caller vouches for the rest.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "svc #0",
            inlateout("x0") a as isize => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x8") number,
            options(nostack),
        );
    }
    outcome(result)
}

/// The kernel's answers from -4095 to -1 are errors.
fn outcome(result: isize) -> Result<usize, c_int> {
    match result {
        -4095..=-1 => Err(-result as c_int),
        _ => Ok(result as usize),
    }
}
