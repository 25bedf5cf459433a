//! Network namespaces without a name: they are gone when the last who holds one is, also after a
//! `kill -9` of the tests.

use super::sys;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

/// A network of its own, without any way out.
#[derive(Clone, Debug)]
pub struct Namespace(Arc<File>);

// === impl Namespace ===

impl Namespace {
    pub(super) fn new() -> Self {
        // A thread of its own: this one stays where it is.
        let made = std::thread::spawn(|| {
            sys::leave_the_network().expect("a network namespace (this test needs root)");
            File::open("/proc/thread-self/ns/net").expect("the namespace of this thread")
        });
        Self(Arc::new(made.join().expect("a network namespace")))
    }

    /// Moves the calling thread into it, for good.
    pub(super) fn enter(&self) {
        move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("a namespace can be entered");
    }

    /// Does something in it. Processes that it starts, and sockets that it makes, stay there.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            self.enter();
            work()
        };
        std::thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs a command in it to its end.
    pub fn output(&self, command: &mut Command) -> Output {
        self.run(|| command.stdin(Stdio::null()).output().expect("it runs"))
    }

    /// Where other programs find it while this one lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Has `ip` do one thing a line.
    pub(super) fn ip(&self, lines: &str) {
        let output = self.run(|| {
            let mut ip = Command::new("ip")
                .args(["-batch", "-"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("ip runs: `cargo xtask setup` installs it");
            let mut stdin = ip.stdin.take().expect("a pipe");
            stdin.write_all(lines.as_bytes()).expect("ip reads");
            drop(stdin);
            ip.wait_with_output().expect("ip ends")
        });
        assert!(
            output.status.success(),
            "ip: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
