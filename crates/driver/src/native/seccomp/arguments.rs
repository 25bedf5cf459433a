//! seccomp rules on arguments: calls that are allowed with some arguments and not with others, and calls that
//! return success without being made.
//!
//! A filter sees registers, not the memory that pointers refer to. So rules are about flags, families,
//! protocols, process ids and option names.

use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

/// Rules by system call: it matches when one of its rules does, or when it has none.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

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

/// Of IP only TCP and UDP. Others (MPTCP, SCTP, DCCP, SMC, UDP-Lite, ping) are kernel code that
/// nothing inside needs, and asking for one loads its module.
const IP_PROTOCOLS: [(i32, i32); 2] = [
    (libc::SOCK_STREAM, libc::IPPROTO_TCP),
    (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
];

/// The bits of `socket`'s second argument that are a type; the rest are flags.
const SOCKET_TYPE_MASK: u64 = 0xf;

/// Allowed netlink protocols: route, for `ip addr`; and audit, so that
/// `useradd` can find that there is none.
const NETLINK_PROTOCOLS: [i32; 2] = [libc::NETLINK_ROUTE, libc::NETLINK_AUDIT];

/// Allowed personalities: Linux, 32-bit uname, no address randomisation (debuggers), and the query.
const PERSONALITIES: [u64; 4] = [0, 0x0008, 0x0004_0000, 0xffff_ffff];

/// Calls that change the scheduling of the process in the first argument.
const SCHEDULING: [i64; 4] = [
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setaffinity,
];

/// Process id of the guest.
const INIT: u64 = 1;

/// `ioprio_set` of one process; others are of a process group or a user.
const IOPRIO_WHO_PROCESS: u64 = 1;

/// `setpriority` of one process.
const PRIO_PROCESS: u64 = 0;

/// Flags for huge pages of the host's pool, which are not charged to any memory limit.
const HUGE_PAGES: [(i64, u8, i32); 3] = [
    (libc::SYS_mmap, 3, libc::MAP_HUGETLB),
    (libc::SYS_memfd_create, 1, libc::MFD_HUGETLB.cast_signed()),
    (libc::SYS_shmget, 2, libc::SHM_HUGETLB),
];

/// Core scheduling, which keeps processes of other sandboxes off the sibling thread of a core.
const PR_SCHED_CORE: u64 = 62;

/// Socket options for buffer sizes.
const BUFFER_SIZES: [i32; 2] = [libc::SO_SNDBUF, libc::SO_RCVBUF];

/// Calls that are refused with EPERM because of their arguments.
pub(super) fn refused() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    namespaces(&mut rules)?;
    sockets(&mut rules)?;
    limits(&mut rules)?;
    scheduling(&mut rules)?;
    huge_pages(&mut rules)?;
    rules.insert(libc::SYS_personality, vec![all(none_of(0, PERSONALITIES))?]);
    // TIOCSTI (input into another process's terminal), and ioctls of the console.
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        add(&mut rules, libc::SYS_ioctl, [is(1, request)])?;
    }
    Ok(rules)
}

/// Calls that return success and are not made.
pub(super) fn pretended() -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    // It would write back dirty pages of the whole machine. `syncfs` and `fsync` are about the
    // sandbox's own file systems, and stay.
    rules.insert(libc::SYS_sync, Vec::new());
    // The kernel itself silently caps these at the machine's limit. Not all
    // buffers are charged to the sandbox's memory (netlink's are not), so they keep their default size.
    for option in BUFFER_SIZES {
        add(
            &mut rules,
            libc::SYS_setsockopt,
            [is(1, number(libc::SOL_SOCKET)), is(2, number(option))],
        )?;
    }
    Ok(rules)
}

fn namespaces(rules: &mut Rules) -> Result<(), BackendError> {
    for flag in NAMESPACE_FLAGS {
        add(rules, libc::SYS_clone, [has(0, number(flag))])?;
    }
    Ok(())
}

fn sockets(rules: &mut Rules) -> Result<(), BackendError> {
    let families = SOCKET_FAMILIES.map(number);
    add(rules, libc::SYS_socket, none_of(0, families))?;
    // Only Unix sockets come in pairs; for others the kernel finds that out after it has made them.
    let local = [number(libc::AF_UNIX)];
    add(rules, libc::SYS_socketpair, none_of(0, local))?;
    let netlink = [is(0, number(libc::AF_NETLINK))];
    let protocols = none_of(2, NETLINK_PROTOCOLS.map(number));
    add(
        rules,
        libc::SYS_socket,
        netlink.into_iter().chain(protocols),
    )?;
    for family in [libc::AF_INET, libc::AF_INET6].map(number) {
        for kind in other_types() {
            add(rules, libc::SYS_socket, [is(0, family), kind])?;
        }
        for (kind, protocol) in IP_PROTOCOLS {
            let of = [is(0, family), masked(1, SOCKET_TYPE_MASK, number(kind))];
            let protocols = none_of(2, [0, number(protocol)]);
            add(rules, libc::SYS_socket, of.into_iter().chain(protocols))?;
        }
    }
    Ok(())
}

/// Every type of socket but stream (1) and datagram (2), in as few comparisons as possible.
fn other_types() -> [Condition; 4] {
    [
        has(1, 4),
        has(1, 8),
        masked(1, SOCKET_TYPE_MASK, 3),
        masked(1, SOCKET_TYPE_MASK, 0),
    ]
}

/// Limits of another process (PID 1 would be starved of descriptors or time), and the limit on
/// cores, which keeps the host from handling them.
fn limits(rules: &mut Rules) -> Result<(), BackendError> {
    let core = u64::from(libc::RLIMIT_CORE);
    add(rules, libc::SYS_prlimit64, [is_not(0, 0), given(2)])?;
    add(rules, libc::SYS_prlimit64, [is(1, core), given(2)])?;
    add(rules, libc::SYS_setrlimit, [is(0, core)])
}

/// Scheduling of the guest must not be changed from inside. It is named by its process id, or by a group
/// or user that it belongs to.
fn scheduling(rules: &mut Rules) -> Result<(), BackendError> {
    for call in SCHEDULING {
        add(rules, call, [is(0, INIT)])?;
    }
    for (call, process) in [
        (libc::SYS_setpriority, PRIO_PROCESS),
        (libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS),
    ] {
        add(rules, call, [is_not(0, process)])?;
        add(rules, call, [is(1, INIT)])?;
    }
    add(rules, libc::SYS_prctl, [is(0, PR_SCHED_CORE)])
}

fn huge_pages(rules: &mut Rules) -> Result<(), BackendError> {
    for (call, argument, flag) in HUGE_PAGES {
        add(rules, call, [has(argument, number(flag))])?;
    }
    Ok(())
}

type Condition = Result<SeccompCondition, BackendError>;

/// Adds a rule for a call: all of these conditions hold.
fn add(
    rules: &mut Rules,
    call: i64,
    conditions: impl IntoIterator<Item = Condition>,
) -> Result<(), BackendError> {
    rules.entry(call).or_default().push(all(conditions)?);
    Ok(())
}

fn all(conditions: impl IntoIterator<Item = Condition>) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

/// Compares an int as the kernel does: without the upper half of the register.
fn is(argument: u8, value: u64) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn is_not(argument: u8, value: u64) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value)
}

fn none_of<const N: usize>(argument: u8, values: [u64; N]) -> [Condition; N] {
    values.map(|value| is_not(argument, value))
}

fn masked(argument: u8, mask: u64, value: u64) -> Condition {
    let op = SeccompCmpOp::MaskedEq(mask);
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
}

/// All bits of `flag` are set.
fn has(argument: u8, flag: u64) -> Condition {
    masked(argument, flag, flag)
}

/// The pointer is not null.
fn given(argument: u8) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)
}

/// A constant of libc, none of which is negative.
fn number(constant: i32) -> u64 {
    u64::from(constant.unsigned_abs())
}
