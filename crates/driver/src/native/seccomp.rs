//! Which system calls the sandbox may make.
//!
//! Two filters, because one can only give one answer to what it refuses:
//! what is known to be dangerous is refused with EPERM, so that a program tells its user so;
//! everything that is on neither list does not exist (ENOSYS), so that libraries fall back to what does.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

mod lists;
mod tree;

/// Flags of clone that make namespaces: each is attack surface that nothing inside needs.
const NAMESPACE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Local and IP sockets, and netlink for `ip addr`; not packet, vsock (which would reach a
/// hypervisor past every network namespace), AF_ALG and the other rarely audited ones.
const SOCKET_FAMILIES: [i32; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// Linux as it is, 32-bit uname, no address randomisation (debuggers), and "tell me".
const PERSONALITIES: [u64; 4] = [0, 0x0008, 0x0004_0000, 0xffff_ffff];

/// The filters, in the order they are installed.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    allowed: BpfProgram,
    refused: BpfProgram,
}

// === impl Filters ===

impl Filters {
    /// Compiles them; they do not depend on the sandbox.
    pub(crate) fn compile() -> Result<Self, seccompiler::BackendError> {
        let arch = TargetArch::try_from(std::env::consts::ARCH)?;
        let known = lists::ALLOWED.iter().chain(lists::REFUSED).copied();
        let refused = SeccompFilter::new(
            refused_rules()?,
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EPERM.unsigned_abs()),
            arch,
        )?;
        Ok(Self {
            allowed: tree::allow(known, libc::ENOSYS),
            refused: refused.try_into()?,
        })
    }

    /// Installs them on the calling thread, for good. It must have `no_new_privs`.
    pub(crate) fn install(&self) -> Result<(), seccompiler::Error> {
        seccompiler::apply_filter(&self.allowed)?;
        seccompiler::apply_filter(&self.refused)
    }
}

fn refused_rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = lists::REFUSED
        .iter()
        .map(|call| (*call, Vec::new()))
        .collect();
    let mut clone = Vec::new();
    for flag in NAMESPACE_FLAGS {
        let flag = u64::from(flag.unsigned_abs());
        clone.push(SeccompRule::new(vec![condition(
            0,
            SeccompCmpArgLen::Qword,
            SeccompCmpOp::MaskedEq(flag),
            flag,
        )?])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let families = SOCKET_FAMILIES.map(|family| u64::from(family.unsigned_abs()));
    rules.insert(libc::SYS_socket, vec![none_of(&families)?]);
    rules.insert(libc::SYS_socketpair, vec![none_of(&families)?]);
    rules.insert(libc::SYS_personality, vec![none_of(&PERSONALITIES)?]);
    // Of netlink only what `ip addr` and, so that it can find no audit there, `useradd` need.
    let netlink = vec![
        condition(
            0,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            u64::from(libc::AF_NETLINK.unsigned_abs()),
        )?,
        condition(
            2,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Ne,
            u64::from(libc::NETLINK_ROUTE.unsigned_abs()),
        )?,
        condition(
            2,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Ne,
            u64::from(libc::NETLINK_AUDIT.unsigned_abs()),
        )?,
    ];
    rules
        .entry(libc::SYS_socket)
        .or_default()
        .push(SeccompRule::new(netlink)?);
    // Limits of another process (PID 1 would be starved of descriptors or time), and the limit on
    // cores, which keeps the host from handling them.
    let others = vec![
        condition(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, 0)?,
        condition(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?,
    ];
    let core = u64::from(libc::RLIMIT_CORE);
    let cores = vec![
        condition(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, core)?,
        condition(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)?,
    ];
    rules.insert(
        libc::SYS_prlimit64,
        vec![SeccompRule::new(others)?, SeccompRule::new(cores)?],
    );
    let cores = condition(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, core)?;
    rules.insert(libc::SYS_setrlimit, vec![SeccompRule::new(vec![cores])?]);
    // Typing into another's terminal, and the console's own commands.
    let mut ioctl = Vec::new();
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        ioctl.push(SeccompRule::new(vec![condition(
            1,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            request,
        )?])?);
    }
    rules.insert(libc::SYS_ioctl, ioctl);
    Ok(rules)
}

fn none_of(values: &[u64]) -> Result<SeccompRule, seccompiler::BackendError> {
    let all: Result<Vec<_>, _> = values
        .iter()
        .map(|value| condition(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, *value))
        .collect();
    SeccompRule::new(all?)
}

fn condition(
    argument: u8,
    len: SeccompCmpArgLen,
    op: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, len, op, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_compile_and_the_lists_are_disjoint() {
        Filters::compile().unwrap();
        for call in lists::REFUSED {
            assert!(
                !lists::ALLOWED.contains(call),
                "system call {call} is on both lists"
            );
        }
    }
}
