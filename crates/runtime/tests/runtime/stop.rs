//! Graceful shutdown on SIGTERM, and the duties of PID 1.

use crate::process::{Client, sh, test};
use crate::support::{Runtime, ask, eventually, is_alive};
use std::time::{Duration, Instant};
use tonic::Code;

#[test]
fn sigterm_reaches_commands_and_probes_fail() {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let runtime = Runtime::with(&["-shutdown-timeout=1m"], &[]);
    tokio.block_on(async {
        let mut client = Client::connect(&runtime).await;
        let script = "trap 'echo asked; until test -e go; do sleep 0.05; done; exit 9' TERM; \
                      echo ready; while :; do sleep 0.05; done";
        let mut polite = client.start(sh(script), None).await.unwrap();
        polite.says("ready").await;
        runtime.terminate();
        polite.says("asked").await;
        let health = runtime.rest("GET", "/v1/health", b"");
        assert_eq!(
            (health.status, &health.json()["code"]),
            (503, &"UNAVAILABLE".into())
        );
        assert_eq!(ask(runtime.legacy, "GET", "/", &[], b"").status, 503);
        let refused = client.execute(sh("true")).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        std::fs::write(runtime.root().join("go"), "").unwrap();
        assert_eq!(polite.exit().await, 9);
    });
    assert!(runtime.wait().success());
}

#[test]
fn a_command_that_ignores_sigterm_is_killed() {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let runtime = Runtime::with(&["-shutdown-timeout=1s"], &[]);
    let stubborn = tokio.block_on(async {
        let mut client = Client::connect(&runtime).await;
        let script = "trap '' TERM; echo $$; while :; do sleep 0.05; done";
        let mut stubborn = client.start(sh(script), None).await.unwrap();
        stubborn.says("\n").await;
        runtime.terminate();
        assert_eq!(stubborn.exit().await, 137);
        stubborn.text()
    });
    let begin = Instant::now();
    assert!(runtime.wait().success());
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert!(!is_alive(&stubborn));
}

#[test]
fn commands_do_not_outlive_a_runtime_that_is_killed() {
    test(&[], &[], async |runtime, mut client| {
        let mut left = client
            .start(sh("echo $$; exec sleep 1000"), None)
            .await
            .unwrap();
        left.says("\n").await;
        let pid = left.text();
        rustix::process::kill_process(runtime.pid(), rustix::process::Signal::KILL).unwrap();
        eventually("it ends", || !is_alive(&pid)).await;
    });
}

#[test]
fn as_pid_1_it_reaps_signals_all_processes_and_reports_a_full_disk() {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let runtime = Runtime::as_init(&["-shutdown-timeout=1m"]);
    tokio.block_on(async {
        let mut client = Client::connect(&runtime).await;
        let said = client
            .execute(sh("cat /proc/1/comm; grep Threads /proc/1/status"))
            .await
            .unwrap();
        assert_eq!(said.stdout, "k8e-runtime\nThreads:\t1\n");

        // An orphaned process is reparented to the runtime, and reaped when it exits.
        let orphan = "(sleep 0.05 & echo $!) | cat; sh -c 'sleep 0.1 & echo $!'";
        let said = client.execute(sh(orphan)).await.unwrap();
        let orphans = String::from_utf8_lossy(&said.stdout).into_owned();
        assert_eq!(orphans.lines().count(), 2);
        let mut gone = false;
        while !gone {
            let look = orphans.lines().map(|pid| format!("test ! -e /proc/{pid}"));
            let look = look.collect::<Vec<_>>().join(" && ");
            gone = client.execute(sh(&look)).await.unwrap().exit_code == 0;
        }

        // The root is a file system of one MiB.
        let full = runtime.rest("PUT", "/v1/files/big", &vec![1; 3_000_000]);
        assert_eq!(full.status, 507, "{full:?}");
        assert!(full.text().contains("disk"), "{full:?}");
        let listed = client.execute(sh("ls -A")).await.unwrap();
        assert_eq!(listed.stdout, "", "what was not finished is gone");

        let daemon = "trap 'echo ended > /dev/stdout; exit' TERM; while :; do sleep 0.05; done";
        let script = format!("setsid sh -c \"{daemon}\" >log 2>&1 & sleep 0.2; echo $!");
        assert_eq!(client.execute(sh(&script)).await.unwrap().exit_code, 0);
        // The log is on a file system that is unmounted with PID 1; a reader outside still has it.
        let script = "trap '' TERM; echo ready; until grep -s ended log; do sleep 0.05; done";
        let mut tail = client.start(sh(script), None).await.unwrap();
        tail.says("ready").await;
        runtime.terminate();
        tail.says("ended").await;
        assert_eq!(tail.exit().await, 0);
    });
    runtime.wait();
}
