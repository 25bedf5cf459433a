//! The guest binary as PID 1 of a pid namespace.

use crate::support::{argv, marker, sh, wait_for_processes, with_listener};
use k8e_wire::proto::Exec;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Starts the guest with the listener at descriptor 3, as the launcher does.
fn start(listener: std::os::unix::net::UnixListener) -> Init {
    Command::new("sh")
        .args(["-c", "exec env -i /usr/bin/unshare --pid --fork --kill-child --mount-proc \"$0\" 3<&0 0</dev/null"])
        .arg(env!("CARGO_BIN_EXE_k8e-guest"))
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(Init)
        .unwrap()
}

/// Kills it at the end of the test, also when that panics.
struct Init(Child);

impl Init {
    /// Binds its own socket.
    fn at(path: &Path) -> Self {
        let guest = env!("CARGO_BIN_EXE_k8e-guest");
        let child = Command::new(guest)
            .arg("--listen")
            .args([path, &path.with_extension("next")])
            .spawn();
        Self(child.unwrap())
    }

    /// Fails when it has ended: a test that waits for it would wait for ever.
    fn assert_runs(&mut self) {
        assert_eq!(self.0.try_wait().unwrap(), None, "the guest ended");
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn init_serves_reaps_and_ends() {
    with_listener(async |listener, guest| {
        let mut init = start(listener);
        let ran = guest
            .exec(sh("cat /proc/1/comm; echo $PPID"))
            .await
            .unwrap();
        assert_eq!(
            String::from_utf8_lossy(&ran.stdout).lines().next(),
            Some("k8e-guest")
        );

        // Orphans of a command that ended become init's, and init reaps them.
        guest
            .exec(sh("for n in 1 2 3 4 5; do (sleep 0.0$n &) ; done"))
            .await
            .unwrap();
        let script = "pgrep -x sleep || grep -ls '^State:.Z' /proc/[0-9]*/status";
        while !guest.exec(sh(script)).await.unwrap().stdout.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }

        let marker = marker();
        let left = guest
            .exec(sh(&format!("setsid sleep {marker} >/dev/null 2>&1 &")))
            .await
            .unwrap();
        assert_eq!(left.exited.exit_code, 0);
        wait_for_processes(&marker, 1).await;
        let code = format!("(setsid sleep {marker} &); sleep {marker}");
        let ran = guest
            .exec(Exec {
                timeout_ms: 200,
                ..sh(&code)
            })
            .await
            .unwrap();
        assert!(ran.exited.timed_out);
        wait_for_processes(&marker, 1).await;

        let ran = guest
            .exec(sh("ulimit -n; cat /proc/1/status | grep Threads"))
            .await
            .unwrap();
        assert!(
            String::from_utf8_lossy(&ran.stdout).ends_with("Threads:\t1\n"),
            "{ran:?}"
        );
        // No process inside can kill it.
        for signal in ["-TERM", "-INT", "-KILL"] {
            guest.exec(argv(&["kill", signal, "1"])).await.unwrap();
        }
        guest.exec(argv(&["true"])).await.unwrap();
        // The pid namespace ends with it.
        init.0.kill().unwrap();
        wait_for_processes(&marker, 0).await;
    });
}

#[test]
fn without_a_listener_it_does_not_start() {
    let guest = Command::new(env!("CARGO_BIN_EXE_k8e-guest"))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(guest.code(), Some(1));
}

#[test]
fn it_binds_the_path_of_its_argument() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.sock");
    let mut guest = Init::at(&path);
    while std::os::unix::net::UnixStream::connect(&path).is_err() {
        guest.assert_runs();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Also the pre-forked supervisor.
#[tokio::test]
async fn nothing_of_it_outlives_it() {
    for round in 0..100 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.sock");
        let mut guest = Init::at(&path);
        while !path.exists() {
            guest.assert_runs();
            std::thread::yield_now();
        }
        // After a slightly longer delay each time, to hit every step of its start.
        let bound = std::time::Instant::now();
        while bound.elapsed() < Duration::from_micros(10) * round {}
        drop(guest);
        wait_for_processes(path.to_str().unwrap(), 0).await;
    }
}

#[test]
fn it_can_test_whether_processes_can_be_made() {
    let run = |args: &[&str]| {
        let status = Command::new(env!("CARGO_BIN_EXE_k8e-guest"))
            .args(args)
            .status();
        status.unwrap().success()
    };
    assert!(run(&["--self-test"]));
    assert!(!run(&["--nonsense"]));
}
