//! A server whose process was taken over: runs system calls as it, and sends what it likes to the
//! launcher. The threat model says what is left to such a server; everything else is refused.

mod flood;
#[cfg(target_arch = "x86_64")]
mod sys;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the takeover suite knows the registers of x86_64 only: add those of this machine");

use k8e_e2e::{Server, Session};
use rustix::net::{AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::net::{SocketFlags, SocketType};
use serde_json::{Value, json};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use sys::{Hijacked, descriptor_of};

const READ: u64 = libc::O_RDONLY as u64;
const WRITE: u64 = libc::O_WRONLY as u64;
const HERE: u64 = libc::AT_FDCWD as i64 as u64;

/// Processes of the launcher: the children of the server, and theirs that are not sandboxes.
fn launchers(server: &Server) -> Vec<u32> {
    let children = |pid: u32| -> Vec<u32> {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    };
    let read = |pid: &u32, file: &str| {
        std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
    };
    // What it forked for good has another name.
    let is_launcher = |pid: &u32| {
        read(pid, "cmdline").starts_with("k8e-launcher") && !read(pid, "comm").contains("sockets")
    };
    let mut found = children(server.pid());
    for pid in found.clone() {
        found.extend(children(pid));
    }
    found.retain(is_launcher);
    found
}

fn sandbox_dir(server: &Server) -> std::path::PathBuf {
    let dir = server.data_dir().join("native/sandboxes");
    let mut entries = std::fs::read_dir(dir).unwrap();
    entries.next().unwrap().unwrap().path()
}

#[test]
fn the_server_is_nobody() {
    let server = Server::start();
    let _session = server.session();
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let field = |name: &str| -> Vec<String> {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        let words = line.split_whitespace().skip(1);
        words.map(str::to_owned).collect()
    };
    assert!(field("Uid:").iter().all(|uid| uid != "0"), "{status}");
    assert!(field("Gid:").iter().all(|gid| gid != "0"), "{status}");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(field("NoNewPrivs:"), ["1"]);
    assert_eq!(field("Seccomp:"), ["2"]);
    assert_eq!(launchers(&server).len(), 2, "a keeper and its worker");
}

#[test]
fn code_in_the_server_cannot_touch_the_host() {
    let server = Server::start();
    let session = server.session();
    let launcher = u64::from(*launchers(&server).last().unwrap());
    let sandbox = sandbox_dir(&server);
    let data = server.data_dir();
    let inside = |path: &Path, name: &str| path.join(name).display().to_string();
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "the host's").unwrap();

    let taken = Hijacked::stop(server.pid()).unwrap();
    let open = |path: &str, flags: u64| {
        taken.call(libc::SYS_openat, &[HERE, taken.string(path), flags, 0o600])
    };
    // First that calls are made at all: what the server may do works.
    let uid = taken.call(libc::SYS_getuid, &[]);
    assert!(uid > 0, "{uid}");
    let own = open(&inside(&data, "store/k8e.db"), READ);
    assert!(own >= 0, "its own file: {own}");

    let program = || taken.string("/bin/sh");
    let nothing = || taken.put(&[0; 16]);
    let create = libc::O_CREAT as u64;
    let attempts: Vec<(&str, i64)> = vec![
        ("read /etc/shadow", open("/etc/shadow", READ)),
        ("read root's home", open("/root", READ)),
        (
            "read a file of the host",
            open(secret.path().to_str().unwrap(), READ),
        ),
        ("read a program", open("/usr/bin/env", READ)),
        ("list /", open("/", READ)),
        ("write to /tmp", open("/tmp/k8e-takeover", WRITE | create)),
        ("write to /etc", open("/etc/k8e-takeover", WRITE | create)),
        (
            "read a sandbox's disk",
            open(&inside(&sandbox, "disk.img"), READ),
        ),
        (
            "change a sandbox's record",
            open(&inside(&sandbox, "record.json"), WRITE),
        ),
        (
            "write to the data directory",
            open(&inside(&data, "new"), WRITE | create),
        ),
        (
            "replace a directory of the launcher",
            taken.call(
                libc::SYS_rename,
                &[
                    taken.string(&inside(&data, "native")),
                    taken.string(&inside(&data, "store/native")),
                ],
            ),
        ),
        (
            "change a control group",
            open("/sys/fs/cgroup/memory/memory.use_hierarchy", WRITE),
        ),
        (
            "change a sysctl",
            open("/proc/sys/kernel/core_pattern", WRITE),
        ),
        (
            "read the launcher's memory",
            open(&format!("/proc/{launcher}/mem"), READ),
        ),
        (
            "read the launcher's environment",
            open(&format!("/proc/{launcher}/environ"), READ),
        ),
        ("open a disk", open("/dev/vda", READ)),
        ("open the kernel's memory", open("/dev/mem", READ)),
        (
            "run a program",
            taken.call(libc::SYS_execve, &[program(), nothing(), nothing()]),
        ),
        (
            "run a program by descriptor",
            taken.call(
                libc::SYS_execveat,
                &[HERE, program(), nothing(), nothing(), 0],
            ),
        ),
        ("fork", taken.call(libc::SYS_clone, &[libc::SIGCHLD as u64])),
        ("fork the old way", taken.call(libc::SYS_fork, &[])),
        ("become root", taken.call(libc::SYS_setresuid, &[0, 0, 0])),
        (
            "join root's group",
            taken.call(libc::SYS_setgroups, &[1, nothing()]),
        ),
        (
            "get capabilities",
            taken.call(libc::SYS_capset, &[nothing(), nothing()]),
        ),
        (
            "mount",
            taken.call(libc::SYS_mount, &[nothing(), nothing(), nothing(), 0, 0]),
        ),
        (
            "make a user namespace",
            taken.call(libc::SYS_unshare, &[libc::CLONE_NEWUSER as u64]),
        ),
        ("enter a namespace", taken.call(libc::SYS_setns, &[0, 0])),
        (
            "change the root",
            taken.call(libc::SYS_chroot, &[taken.string("/tmp")]),
        ),
        (
            "trace the launcher",
            taken.call(
                libc::SYS_ptrace,
                &[libc::PTRACE_SEIZE.into(), launcher, 0, 0],
            ),
        ),
        (
            "read the launcher's memory by a call",
            taken.call(
                libc::SYS_process_vm_readv,
                &[launcher, nothing(), 0, nothing(), 0, 0],
            ),
        ),
        (
            "kill the launcher",
            taken.call(libc::SYS_kill, &[launcher, 9]),
        ),
        (
            "kill the launcher's thread",
            taken.call(libc::SYS_tgkill, &[launcher, launcher, 9]),
        ),
        ("kill PID 1", taken.call(libc::SYS_tgkill, &[1, 1, 9])),
        (
            "hold a process",
            taken.call(libc::SYS_pidfd_open, &[launcher, 0]),
        ),
        (
            "make a device",
            taken.call(
                libc::SYS_mknod,
                &[taken.string("/tmp/null"), 0o020_666, 0x103],
            ),
        ),
        (
            "load a module",
            taken.call(libc::SYS_init_module, &[nothing(), 0, nothing()]),
        ),
        (
            "load a kernel",
            taken.call(libc::SYS_kexec_load, &[0, 0, 0, 0]),
        ),
        (
            "load a program into the kernel",
            taken.call(libc::SYS_bpf, &[0, nothing(), 16]),
        ),
        (
            "use io_uring",
            taken.call(libc::SYS_io_uring_setup, &[1, nothing()]),
        ),
        (
            "use the kernel's keys",
            taken.call(libc::SYS_keyctl, &[0, 0, 0, 0, 0]),
        ),
        (
            "read packets",
            taken.call(
                libc::SYS_socket,
                &[libc::AF_PACKET as u64, libc::SOCK_RAW as u64, 0],
            ),
        ),
        (
            "send raw packets",
            taken.call(
                libc::SYS_socket,
                &[libc::AF_INET as u64, libc::SOCK_RAW as u64, 6],
            ),
        ),
        (
            "talk to the hypervisor",
            taken.call(
                libc::SYS_socket,
                &[libc::AF_VSOCK as u64, libc::SOCK_STREAM as u64, 0],
            ),
        ),
        (
            "set the clock",
            taken.call(libc::SYS_settimeofday, &[nothing(), 0]),
        ),
        (
            "raise its limits",
            taken.call(
                libc::SYS_prlimit64,
                &[0, libc::RLIMIT_NPROC.into(), nothing(), 0],
            ),
        ),
    ];
    drop(taken);
    let done: Vec<_> = attempts.iter().filter(|(_, result)| *result >= 0).collect();
    assert!(done.is_empty(), "not refused: {done:?}");
    assert!(attempts.len() >= 40, "{} attempts", attempts.len());
    // It goes on as if nothing had been.
    assert_eq!(session.sh("echo fine").out(), "fine\n");
}

/// The server's end of the channel to the launcher's worker: the one that is answered. The keeper reads
/// nothing.
fn channel(server: &Server) -> OwnedFd {
    let dir = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
    let numbers = dir
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let question = br#"{"List":{"kind":"Native","after":null}}"#;
    let mut channels = numbers
        .filter_map(|number| descriptor_of(server.pid(), number).ok())
        .filter(|fd| {
            rustix::net::sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::SEQPACKET)
        });
    channels
        .find(|fd| ask(fd, question, KEEPER_SILENT).is_some())
        .expect("a channel that is answered")
}

/// After this long it is the keeper that was asked.
const KEEPER_SILENT: i64 = 5;

/// Far more than an answer takes.
const ANSWERED: i64 = 60;

/// Sends as nobody but the server can, and returns the answer.
fn ask(channel: &OwnedFd, message: &[u8], seconds: i64) -> Option<Value> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let (own, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let fds = [theirs.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(
        channel,
        &[IoSlice::new(message)],
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
    .unwrap();
    drop(theirs);
    let limit = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    let ready = poll(&mut [PollFd::new(&own, PollFlags::IN)], Some(&limit)).unwrap();
    if ready == 0 {
        return None;
    }
    let mut bytes = vec![0; 256 * 1024];
    let (length, _) = rustix::net::recv(&own, &mut bytes, RecvFlags::empty()).unwrap();
    serde_json::from_slice(&bytes[..length]).ok()
}

#[test]
fn the_launcher_does_what_is_on_its_list_and_nothing_else() {
    let server = Server::start();
    let session = server.session();
    let sandbox = sandbox_dir(&server);
    let id = sandbox.file_name().unwrap().to_str().unwrap();
    let max = u64::MAX;
    let limits = |memory: u64| json!({"memory_bytes": memory, "cpu_millis": 1000, "pids": 64, "disk_bytes": 1 << 30});
    let hostile = [
        json!({"Run": {"program": "/bin/sh"}}),
        json!({"Remove": {"kind": "Native", "id": "../../../etc"}}),
        json!({"Remove": {"kind": "Native", "id": "/etc"}}),
        json!({"Remove": {"kind": "Other", "id": id}}),
        json!({"OpenGate": {"kind": "Native", "id": "nobody"}}),
        json!({"OpenGate": {"kind": "Native", "id": id, "pid": 1}}),
        json!({"SetLimits": {"kind": "Native", "id": id, "limits": limits(max)}}),
        json!({"SetLimits": {"kind": "Native", "id": "nobody", "limits": limits(64 << 20)}}),
        json!({"Signal": {"kind": "Gvisor", "id": id, "signal": "Kill"}}),
        json!({"Launch": {"kind": "Native", "platform": "systrap",
            "spec": {"id": "sbx-huge", "template": "host", "limits": limits(max)}}}),
        json!({"Launch": {"kind": "Native", "platform": "systrap",
            "spec": {"id": id, "template": "host", "limits": limits(64 << 20)}}}),
        json!([]),
        json!("x".repeat(60_000)),
    ];
    let channel = channel(&server);
    let ask = |message: &[u8]| ask(&channel, message, ANSWERED).expect("an answer");
    for message in &hostile {
        let answer = ask(&serde_json::to_vec(message).unwrap());
        assert!(answer["Failed"].is_object(), "{message}: {answer}");
    }
    assert!(ask(b"\xff\x00 not JSON")["Failed"].is_object());
    // The worker lives, and what was not asked for was not done.
    assert_eq!(session.sh("echo fine").out(), "fine\n");
    assert_eq!(server.session().sh("echo fine").out(), "fine\n");
    server.assert_traces(2);
}

/// The worker of the launcher: the child of the keeper.
fn kill_worker(server: &Server) {
    let worker = *launchers(server).last().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(worker).unwrap()).unwrap();
    let held = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    rustix::process::pidfd_send_signal(&held, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_killed_launcher_is_replaced_and_no_sandbox_is_lost() {
    let server = Server::start();
    let session = server.session();
    session.sh("echo kept > f");
    for _ in 0..3 {
        kill_worker(&server);
        let other: Session<'_> = server.session();
        assert_eq!(other.sh("echo fine").out(), "fine\n");
        other.destroy();
        assert_eq!(session.sh("cat f").out(), "kept\n");
    }
    session.destroy();
    server.assert_traces(0);
}
