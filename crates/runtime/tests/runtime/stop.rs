//! The end, as SIGTERM brings it.

use crate::process::{Client, sh, test};
use crate::support::{Runtime, ask, is_alive, until};
use std::time::{Duration, Instant};
use tonic::Code;

#[test]
fn commands_are_asked_to_end_and_probes_are_told() {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
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
        assert_eq!((health.status, &health.json()["code"]), (503, &"UNAVAILABLE".into()));
        assert_eq!(ask(runtime.legacy, "GET", "/", &[], b"").status, 503);
        let refused = client.execute(sh("true")).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        std::fs::write(runtime.root().join("go"), "").unwrap();
        assert_eq!(polite.exit().await, 9);
    });
    assert!(runtime.wait().success());
}

#[test]
fn who_does_not_end_is_killed() {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
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
        let mut left = client.start(sh("echo $$; exec sleep 1000"), None).await.unwrap();
        left.says("\n").await;
        let pid = left.text();
        rustix::process::kill_process(runtime.pid(), rustix::process::Signal::KILL).unwrap();
        until("it ends", || !is_alive(&pid));
    });
}
