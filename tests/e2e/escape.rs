//! The escape suite: what docs/threat-model.md claims, tried from inside as root.
//!
//! Each attempt prints `ESCAPED` when it got what it wanted. An attempt that could not even be made
//! (a missing tool, a typo) must not pass as a defence, so each says `tried` when it got there.

mod devices;
mod files;
mod kernel;
mod neighbours;
mod network;
mod processes;
mod resources;
mod scheduling;
mod socket_buffers;

use k8e_e2e::{Server, Session};

/// System calls by number for Python, and what each gave.
const PRELUDE: &str = r#"
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    # Whole registers: ctypes passes an int as 32 bits.
    args = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = libc.syscall(ctypes.c_long(number), *args)
    return result, ctypes.get_errno()
def refused(number, *args, by=(errno.EPERM,)):
    result, code = call(number, *args)
    print("tried", number, result, errno.errorcode.get(code, code))
    if result != -1 or code not in by:
        print("ESCAPED", number)
"#;

/// Runs Python inside as root; it must have tried and must not have escaped.
fn attempt(script: &str) {
    let server = Server::start();
    attempt_in(&server.session(), script);
}

/// The same, whatever isolates the sandbox.
fn everywhere(script: &str) {
    attempt(script);
    let server = Server::start_with(&["--default-runtime", "gvisor"]);
    attempt_in(&server.session(), script);
}

fn attempt_in(session: &Session<'_>, script: &str) {
    let ran = session.py(&format!("{PRELUDE}\n{script}"));
    assert!(
        ran.out().contains("tried"),
        "the attempt was not made: {}",
        ran.all()
    );
    assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
    assert_eq!(ran.code, 0, "{}", ran.all());
}

/// Runs a shell script inside as root; it must have tried and must not have escaped.
fn attempt_sh(script: &str) {
    let server = Server::start();
    attempt_sh_in(&server.session(), script);
}

/// The same, whatever isolates the sandbox.
fn everywhere_sh(script: &str) {
    attempt_sh(script);
    let server = Server::start_with(&["--default-runtime", "gvisor"]);
    attempt_sh_in(&server.session(), script);
}

fn attempt_sh_in(session: &Session<'_>, script: &str) {
    let ran = session.sh(script);
    assert!(
        ran.out().contains("tried"),
        "the attempt was not made: {}",
        ran.all()
    );
    assert!(!ran.out().contains("ESCAPED"), "{}", ran.all());
}
