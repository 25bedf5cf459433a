//! Compiles the seccomp allow list to a BPF binary search tree.
//!
//! A filter that compares one number after another has some 1,700 instructions, and checking them
//! takes the kernel a millisecond of every sandbox's start. The numbers lie in few runs; a binary
//! search over where runs begin and end takes a tenth of that.

use seccompiler::sock_filter;

/// Offsets of the system call number and the architecture in `struct seccomp_data`.
const NUMBER_OFFSET: u32 = 0;
const ARCH_OFFSET: u32 = 4;

const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_GREATER_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

/// A filter that allows these calls; others fail with `errno`. A call of another
/// architecture's ABI kills the process: its numbers mean other calls.
pub(super) fn allow(calls: impl Iterator<Item = i64>, errno: i32) -> Vec<sock_filter> {
    let mut calls: Vec<u32> = calls
        .map(|call| u32::try_from(call).expect("system calls have small numbers"))
        .collect();
    calls.sort_unstable();
    calls.dedup();
    // Numbers at which the result flips; below the first the call is refused.
    let mut turns: Vec<u32> = Vec::new();
    for call in calls {
        if turns.last() == Some(&call) {
            turns.pop();
        } else {
            turns.push(call);
        }
        turns.push(call + 1);
    }
    let refuse = libc::SECCOMP_RET_ERRNO | errno.unsigned_abs();
    let mut program = vec![
        instruction(LOAD_WORD, ARCH_OFFSET),
        sock_filter {
            code: JUMP_IF_EQUAL,
            jt: 1,
            jf: 0,
            k: ARCH,
        },
        instruction(RETURN, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(LOAD_WORD, NUMBER_OFFSET),
    ];
    program.extend(tree(&turns, [refuse, libc::SECCOMP_RET_ALLOW]));
    program
}

/// `answers[0]` below the first boundary, then alternating.
fn tree(turns: &[u32], answers: [u32; 2]) -> Vec<sock_filter> {
    let middle = turns.len() / 2;
    let Some(turn) = turns.get(middle) else {
        return vec![instruction(RETURN, answers[0])];
    };
    let below = tree(&turns[..middle], answers);
    let [even, odd] = answers;
    let from = tree(
        &turns[middle + 1..],
        if middle.is_multiple_of(2) {
            [odd, even]
        } else {
            [even, odd]
        },
    );
    let jt = u8::try_from(below.len()).expect("half of the runs of system calls are few");
    let mut program = vec![sock_filter {
        code: JUMP_IF_GREATER_EQUAL,
        jt,
        jf: 0,
        k: *turn,
    }];
    program.extend(below);
    program.extend(from);
    program
}

fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the program as the kernel does.
    fn answer(program: &[sock_filter], arch: u32, number: u32) -> u32 {
        let (mut at, mut value) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            let jump = match step.code {
                LOAD_WORD => {
                    value = if step.k == ARCH_OFFSET { arch } else { number };
                    continue;
                }
                RETURN => return step.k,
                JUMP_IF_EQUAL => value == step.k,
                JUMP_IF_GREATER_EQUAL => value >= step.k,
                other => panic!("instruction {other:#x}"),
            };
            at += usize::from(if jump { step.jt } else { step.jf });
        }
    }

    fn check(calls: &[i64]) {
        let program = allow(calls.iter().copied(), libc::ENOSYS);
        let refuse = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
        let numbers = (0..1000).chain([0x3fff_ffff, 0x4000_0000, 0x4000_0001, u32::MAX]);
        for number in numbers {
            let want = if calls.contains(&i64::from(number)) {
                libc::SECCOMP_RET_ALLOW
            } else {
                refuse
            };
            assert_eq!(
                answer(&program, ARCH, number),
                want,
                "{number} of {calls:?}"
            );
        }
        assert_eq!(
            answer(&program, 0x4000_0003, 1),
            libc::SECCOMP_RET_KILL_PROCESS
        );
    }

    #[test]
    fn the_tree_answers_as_the_list() {
        check(&[]);
        check(&[0]);
        check(&[5]);
        check(&[0, 1, 2, 7, 8, 500]);
        check(&[3, 1, 2, 3]);
        let known: Vec<i64> = super::super::lists::ALLOWED
            .iter()
            .chain(super::super::lists::REFUSED)
            .copied()
            .collect();
        check(&known);
        assert!(allow(known.into_iter(), libc::ENOSYS).len() < 300);
    }
}
