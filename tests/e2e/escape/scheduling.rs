//! Attempts to be scheduled before others, to slow others down, or to slow the guest down.

use super::{attempt, attempt_in, everywhere};
use k8e_e2e::Server;

#[test]
fn slow_the_guest_down() {
    let server = Server::start();
    let session = server.session();
    attempt_in(
        &session,
        r#"
idle = (ctypes.c_int * 1)(0)
refused(144, 1, 5, idle)                          # sched_setscheduler: SCHED_IDLE
refused(142, 1, idle)                             # sched_setparam
attr = (ctypes.c_uint32 * 14)(56, 5)
refused(314, 1, attr, 0)                          # sched_setattr
refused(203, 1, 8, (ctypes.c_uint64 * 1)(1))      # sched_setaffinity
refused(141, 0, 1, 19)                            # setpriority of a process
refused(251, 1, 1, 3 << 13)                       # ioprio_set: idle
"#,
    );
    assert_eq!(session.sh("echo alive").out(), "alive\n");
}

#[test]
fn slow_the_guest_down_by_its_group_or_user() {
    attempt(
        r#"
for which in (1, 2):
    refused(141, which, 0, 19); refused(141, which, 1, 19)                # setpriority
for which in (2, 3):
    refused(251, which, 0, 3 << 13); refused(251, which, 1, 3 << 13)      # ioprio_set
try: os.setpgid(0, 1)
except OSError: pass
refused(141, 1, 0, 19)
"#,
    );
}

#[test]
fn be_scheduled_before_everybody() {
    everywhere(
        r#"
print("tried")
for policy in (1, 2):
    try:
        os.sched_setscheduler(0, policy, os.sched_param(50))
        if os.sched_getscheduler(0) == policy: print("ESCAPED", policy)
    except OSError: pass
"#,
    );
}

#[test]
fn be_scheduled_before_everybody_by_attributes() {
    // SCHED_DEADLINE, SCHED_FIFO, SCHED_RR; a nice value below zero; the real-time class of disks.
    attempt(
        r#"
import struct
for policy, priority in ((6, 0), (1, 50), (2, 50)):
    attr = struct.pack("=IIQiIQQQ", 48, policy, 0, 0, priority, 10**6, 10**7, 10**7)
    refused(314, 0, attr, 0)
refused(141, 0, 0, -10, by=(errno.EACCES, errno.EPERM))
refused(251, 1, 0, 1 << 13)
"#,
    );
}

#[test]
fn keep_others_off_the_core() {
    attempt("for op in (0, 1, 2, 3): refused(157, 62, op, 0, 0, 0)"); // PR_SCHED_CORE
}

#[test]
fn use_more_processors_than_it_has() {
    // What it may use is time, whatever the number: affinity must not get it more.
    let server = Server::start();
    attempt_in(
        &server.session_with(&["--cpus", "0.5"]),
        r#"
import time
print("tried")
os.sched_setaffinity(0, range(os.cpu_count()))
start = time.monotonic()
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() - start < 2: pass
        os._exit(0)
for _ in range(4): os.wait()
spent, passed = sum(os.times()[2:4]), time.monotonic() - start
if spent > passed * 0.75 + 0.3: print("ESCAPED", spent, passed)
"#,
    );
}

#[test]
fn schedule_itself() {
    // Not an escape: what programs do to their own threads must work.
    let server = Server::start();
    let ran = server.session().py("import os, threading\n\
         os.sched_setaffinity(0, {0}); os.nice(5)\n\
         os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))\n\
         os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)\n\
         os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n\
         print('ok')");
    assert_eq!(ran.out(), "ok\n", "{}", ran.all());
}
