//! Attempts on processes outside, and on the guest.

use super::{attempt, everywhere_sh};
use k8e_e2e::Server;

#[test]
fn see_processes_of_the_host() {
    everywhere_sh(
        "echo tried; [ $(ls -d /proc/[0-9]* | wc -l) -lt 12 ] || echo ESCAPED; grep -l 'k8e.server' /proc/[0-9]*/cmdline 2>/dev/null && echo ESCAPED; true",
    );
}

#[test]
fn trace_the_guest() {
    attempt(
        r#"
refused(101, 16, 1, 0, 0)          # PTRACE_ATTACH
refused(101, 0x4206, 1, 0, 0)      # PTRACE_SEIZE
buf = (ctypes.c_char * 64)()
iov = (ctypes.c_ulong * 2)(ctypes.addressof(buf), 64)
remote = (ctypes.c_ulong * 2)(0x400000, 64)
refused(310, 1, iov, 1, remote, 1, 0)  # process_vm_readv
for name in ("mem", "environ", "maps", "auxv", "stack", "pagemap", "map_files"):
    try:
        path = "/proc/1/" + name
        got = os.listdir(path) if name == "map_files" else open(path, "rb").read(16)
        if got: print("ESCAPED", name)
    except OSError: pass
pidfd, _ = call(434, 1, 0)
refused(438, pidfd, 3, 0)          # pidfd_getfd: the guest's listener
"#,
    );
}

#[test]
fn kill_the_guest() {
    let server = Server::start();
    let session = server.session();
    session.sh("kill -9 1; kill -STOP 1; kill -TERM 1; kill -SEGV 1; kill -USR1 1; true");
    let after = session.sh("echo alive");
    assert_eq!(after.out(), "alive\n", "{}", after.all());
}

#[test]
fn signal_processes_outside() {
    let server = Server::start();
    let session = server.session();
    let mut victim = std::process::Command::new("sleep")
        .arg("300")
        .spawn()
        .unwrap();
    let ran = session.py(&format!(
        r#"
import os, signal
print("tried")
for pid in [{}, {}] + list(range(2, 40000)):
    if pid in (os.getpid(), os.getppid()): continue
    try: os.kill(pid, signal.SIGKILL)
    except ProcessLookupError: pass
    except PermissionError: print("ESCAPED: it sees", pid)
"#,
        victim.id(),
        server.pid()
    ));
    assert!(
        ran.out().contains("tried") && !ran.out().contains("ESCAPED"),
        "{}",
        ran.all()
    );
    assert!(
        victim.try_wait().unwrap().is_none(),
        "a process of the host was killed"
    );
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert_eq!(session.sh("echo alive").out(), "alive\n");
}

#[test]
fn gain_privileges_by_setuid() {
    attempt(
        r#"
import subprocess, shutil, stat
print("tried")
shutil.copy("/usr/bin/python3", "/workspace/p"); os.chmod("/workspace/p", 0o4755)
out = subprocess.run(["/workspace/p", "-c", "import os; os.setuid(0); print(open('/proc/self/status').read())"], capture_output=True, text=True, preexec_fn=lambda: (os.setgid(1000), os.setuid(1000)))
if "Uid:\t0" in out.stdout: print("ESCAPED", out.stdout)
caps = [line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1]
dangerous = (1 << 21) | (1 << 12) | (1 << 13) | (1 << 16) | (1 << 17) | (1 << 19) | (1 << 22) | (1 << 25) | (1 << 27) | (1 << 39) | (1 << 38)
if int(caps, 16) & dangerous: print("ESCAPED caps", caps)
if "NoNewPrivs:\t1" not in open("/proc/self/status").read(): print("ESCAPED nnp")
"#,
    );
}

#[test]
fn run_as_the_hosts_root_outside() {
    let server = Server::start();
    let session = server.session();
    assert_eq!(
        session
            .sh("sleep 61.7311 & until grep -q sleep /proc/$!/comm; do :; done")
            .code,
        0
    );
    let out = std::process::Command::new("ps")
        .args(["-eo", "uid,args"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text
        .lines()
        .find(|line| line.contains("sleep 61.7311"))
        .expect("the process is seen from the host");
    let uid: u32 = line.split_whitespace().next().unwrap().parse().unwrap();
    assert!(uid >= 0x7000_0000, "root inside is {uid} outside");
}

#[test]
fn starve_the_guest_of_limits() {
    let server = Server::start();
    let session = server.session();
    super::attempt_in(
        &session,
        r#"
zero = (ctypes.c_ulong * 2)(0, 0)
for resource in (0, 1, 4, 7): refused(302, 1, resource, zero, None)  # prlimit64 of PID 1
refused(302, 0, 4, zero, None)                                      # cores: 0 would mean "to the host's program"
refused(160, 4, zero)                                               # setrlimit
"#,
    );
    assert_eq!(session.sh("echo alive").out(), "alive\n");
}

#[test]
fn trace_the_supervisor() {
    // The parent of a command is a process in the guest's own memory.
    attempt(
        r#"
parent = os.getppid()
refused(101, 16, parent, 0, 0)           # PTRACE_ATTACH
refused(101, 0x4206, parent, 0, 0)       # PTRACE_SEIZE
buf = (ctypes.c_char * 64)()
iov = (ctypes.c_ulong * 2)(ctypes.addressof(buf), 64)
remote = (ctypes.c_ulong * 2)(0x400000, 64)
refused(310, parent, iov, 1, remote, 1, 0)   # process_vm_readv
refused(311, parent, iov, 1, remote, 1, 0)   # process_vm_writev
for name in ("mem", "environ", "maps", "auxv", "pagemap"):
    try:
        if open(f"/proc/{parent}/{name}", "rb").read(16): print("ESCAPED", name)
    except OSError: pass
pidfd, _ = call(434, parent, 0)
refused(438, pidfd, 3, 0)                # pidfd_getfd
"#,
    );
}

#[test]
fn look_into_the_guest() {
    attempt(
        r#"
refused(312, os.getpid(), 1, 0, 1, 1)                       # kcmp
refused(274, 1, (ctypes.c_char * 8)(), (ctypes.c_char * 8)())   # get_robust_list
pidfd, _ = call(434, 1, 0)
iov = (ctypes.c_ulong * 2)(0x400000, 4096)
refused(440, pidfd, iov, 1, 21, 0, by=(errno.EPERM, errno.EACCES))   # process_madvise: page it out
for name in ("fd", "fdinfo", "root", "cwd", "exe", "ns/net", "task/1/fd", "syscall", "personality", "io", "timers"):
    path = "/proc/1/" + name
    for look in (os.listdir, os.readlink, lambda p: open(p).read()):
        try:
            got = look(path)
            if got and not (name in ("root", "cwd") and got == "/"): print("ESCAPED", name, got)
        except OSError: pass
"#,
    );
}

#[test]
fn turn_the_guests_knobs() {
    let server = Server::start();
    let session = server.session();
    super::attempt_in(
        &session,
        r#"
for name, value in (("oom_score_adj", "1000"), ("oom_adj", "15"), ("autogroup", "19"), ("comm", "evil"), ("coredump_filter", "ff"),
                    ("clear_refs", "1"), ("timerslack_ns", "1000000000"), ("loginuid", "7"), ("make-it-fail", "1"), ("sched", "0"),
                    ("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1"), ("attr/current", "x"), ("timens_offsets", "monotonic 1 0")):
    print("tried", name)
    try:
        with open("/proc/1/" + name, "w") as knob: knob.write(value)
        print("ESCAPED", name)
    except OSError: pass
"#,
    );
    assert_eq!(session.sh("echo alive").out(), "alive\n");
}

#[test]
fn become_somebody_who_does_not_exist_inside() {
    // Numbers that are not the sandbox's would be somebody's outside.
    attempt(
        r#"
open("/workspace/f", "w").close()
for number in (65536, 70000, 1 << 30, 0x70000000, 0xfffffffe):
    refused(117, number, number, number, by=(errno.EINVAL,))          # setresuid
    refused(119, number, number, number, by=(errno.EINVAL,))          # setresgid
    refused(92, b"/workspace/f", number, number, by=(errno.EINVAL, errno.EOVERFLOW, errno.EPERM))  # chown
for name, text in (("uid_map", "0 0 4294967295"), ("gid_map", "0 0 4294967295"), ("setgroups", "allow")):
    try:
        with open("/proc/self/" + name, "w") as file: file.write(text)
        print("ESCAPED", name)
    except OSError: pass
"#,
    );
}

#[test]
fn take_back_capabilities() {
    attempt(
        r#"
import struct
header = struct.pack("=Ii", 0x20080522, 0)
everything = struct.pack("=6I", *[0xffffffff] * 6)
refused(126, header, everything)                                      # capset
for cap in (1, 12, 13, 16, 17, 19, 21, 22, 23, 24, 25, 27, 38, 39, 40):
    refused(157, 47, 2, cap, 0, 0)                                    # PR_CAP_AMBIENT_RAISE
refused(157, 35, 8, 0, 0, 0)                                          # PR_SET_MM
for name in (b"trusted.k8e", b"trusted.overlay.redirect", b"security.k8e"):
    open("/workspace/x", "w").close()
    refused(188, b"/workspace/x", name, b"x", 1, 0, by=(errno.EPERM, errno.EOPNOTSUPP))  # setxattr
"#,
    );
}
