//! `kill -9` of the server at bad moments: what lived goes on, what died is reported, nothing is left behind.

use k8e_e2e::Server;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::process::Stdio;
use std::time::{Duration, Instant};

const ROUNDS: usize = 10;
const CREATES: usize = 50;
const COMMANDS: usize = 50;
const KEPT: usize = 5;

#[test]
fn sessions_survive_kill_9_ten_times() {
    let mut server = Server::start();
    let kept: Vec<String> = (0..KEPT).map(|i| format!("kept-{i}")).collect();
    for id in &kept {
        let session = server.session_with(&["--session-id", id, "--idle-timeout", "never"]);
        assert_eq!(
            session
                .sh(&format!("echo {id} > mine; sleep 1000 & echo $! > pid"))
                .code,
            0
        );
    }
    for round in 0..ROUNDS {
        crash_under_load(&mut server, &kept, round);
        server.restart();
        for id in &kept {
            let ran = server.k8e(&[
                "sandbox",
                "run",
                "--raw",
                "--session-id",
                id,
                "cat mine; kill -0 $(cat pid) && echo alive",
            ]);
            assert_eq!(
                ran.out(),
                format!("{id}\nalive\n"),
                "round {round}: {}",
                ran.all()
            );
        }
        settle(&server, round);
    }
    // A session that dies while nobody watches is reported when somebody does.
    let victim = &kept[0];
    server.kill();
    kill_sandbox_of(victim);
    server.restart();
    // It may have been dying still when it was taken over.
    let deadline = Instant::now() + Duration::from_secs(20);
    let got = loop {
        let got = server.k8e(&["sandbox", "get", victim]).json();
        if got["phase"] == "ended" || Instant::now() > deadline {
            break got;
        }
    };
    assert_eq!(got["phase"], "ended", "{got}");
    assert!(!got["reason"].as_str().unwrap().is_empty(), "{got}");
    settle(&server, ROUNDS);
    for id in server.session_ids() {
        assert_eq!(server.k8e(&["sandbox", "destroy", &id]).code, 0);
    }
    server.assert_traces(0);
}

/// Starts creates and commands, and kills the server in the middle of them.
fn crash_under_load(server: &mut Server, kept: &[String], round: usize) {
    let mut clients = Vec::new();
    let silent = |command: &mut std::process::Command| {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    for i in 0..COMMANDS {
        let args = [
            "sandbox",
            "run",
            "--raw",
            "--timeout",
            "0",
            "--session-id",
            &kept[i % KEPT],
            "echo x >> busy; sleep 30",
        ];
        clients.push(silent(&mut server.command(&args)));
    }
    for i in 0..CREATES {
        let id = format!("round-{round}-{i}");
        clients.push(silent(&mut server.command(&[
            "sandbox",
            "create",
            "--session-id",
            &id,
            "--tenant",
            &id,
        ])));
    }
    // Another moment each round: from "hardly begun" to "nearly done".
    std::thread::sleep(Duration::from_millis(100 + 250 * round as u64));
    server.kill();
    for mut client in clients {
        client.wait().unwrap();
    }
}

/// The machine holds exactly what the store says is alive.
fn settle(server: &Server, round: usize) {
    let live = server.session_ids();
    server.assert_traces(live.len());
    for id in live.iter().filter(|id| id.starts_with("round-")) {
        let ran = server.k8e(&["sandbox", "run", "--raw", "--session-id", id, "echo ok"]);
        assert_eq!(
            ran.out(),
            "ok\n",
            "round {round}: a session that is listed answers: {}",
            ran.all()
        );
        assert_eq!(server.k8e(&["sandbox", "destroy", id]).code, 0);
    }
    server.assert_traces(server.session_ids().len());
    // Commands of clients that died with the server are gone from the kept sessions.
    let deadline = Instant::now() + Duration::from_secs(20);
    for id in server.session_ids() {
        let count = || {
            server
                .k8e(&[
                    "sandbox",
                    "run",
                    "--raw",
                    "--session-id",
                    &id,
                    "pgrep -xc -f 'sleep 30' || true",
                ])
                .out()
        };
        while count() != "0\n" {
            assert!(
                Instant::now() < deadline,
                "round {round}: commands outlived their clients in {id}"
            );
        }
    }
}

/// Kills every process of the sandbox from the host, found by a file of its workspace.
fn kill_sandbox_of(session: &str) {
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        let pid = Pid::from_raw(pid).unwrap();
        // Held while it is looked at: the id could be another's by the time of the signal.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        let mine =
            std::fs::read_to_string(entry.path().join("root/workspace/mine")).unwrap_or_default();
        if mine.trim() == session {
            match pidfd_send_signal(&process, Signal::KILL) {
                // It died with the sandbox's first process.
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => panic!("kill {pid:?}: {error}"),
            }
        }
    }
}
