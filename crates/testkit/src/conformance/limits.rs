//! Limits: what happens at them, and that the sandbox and the machine stay usable.

use super::Lab;
use super::call::sh;
use k8e_model::Limits;
use k8e_wire::proto::Exec;
use std::time::Duration;

const MIB: u64 = 1024 * 1024;

/// A fork bomb stops at the limit, and ends with its command.
pub async fn processes_are_limited(lab: &mut Lab) {
    let cell = lab
        .launch_with(Limits {
            pids: 40,
            ..Limits::default()
        })
        .await;
    let script = "python3 -c '
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
except OSError as e: print(e.errno)
print(25 < made < 40)'";
    let exec = Exec {
        timeout_ms: 20_000,
        ..sh(script)
    };
    let ran = cell.host().exec(exec).await.expect("it runs");
    assert_eq!(ran.out(), "11\nTrue", "{ran:?}");
    // What was killed counts until it is reaped: the limit may be reached for a moment.
    let started = async |exec: Exec| {
        for _ in 0..200 {
            if cell.host().exec(exec.clone()).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("no command starts any more");
    };
    started(sh("pkill python3")).await;
    let bomb = Exec {
        timeout_ms: 1500,
        ..sh("b() { b | b & }; b; sleep 60")
    };
    // It may not even get a process of its own for `sleep`.
    started(bomb).await;
    for _ in 0..200 {
        if let Ok(ran) = cell.host().exec(sh("echo alive")).await
            && ran.out() == "alive"
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the sandbox does not run commands any more");
}

/// Who takes too much is ended: the command, or with a kernel of its own the sandbox; and it is said.
pub async fn memory_is_limited(lab: &mut Lab) {
    let cell = lab
        .launch_with(Limits {
            memory_bytes: 128 * MIB,
            ..Limits::default()
        })
        .await;
    let fits = cell
        .sh("python3 -c 'x = b\"x\" * (48 << 20); print(len(x) >> 20)'")
        .await;
    assert_eq!(fits.out(), "48", "{fits:?}");
    let guest = cell.sandbox.guest();
    let call = k8e_wire::proto::request::Call::Exec(sh(
        "python3 -c 'x = [bytes([n % 251]) * (8 << 20) for n in range(200)]; print(\"survived\")'",
    ));
    let mut end = guest.call(call).await.expect("the guest takes calls");
    let ended = tokio::select! {
        () = cell.sandbox.died() => "sandbox",
        () = async {
            while let Ok(reply) = end.replies.next().await {
                assert!(!format!("{reply:?}").contains("survived"));
                if matches!(reply, k8e_wire::proto::reply::Reply::Exited(_)) {
                    return;
                }
            }
            std::future::pending().await
        } => "command",
    };
    assert!(cell.sandbox.limit_events().oom_kills > 0, "{ended}");
    if ended == "command" {
        assert_eq!(cell.sh("echo alive").await.out(), "alive");
    }
}

/// The disk has an end, and a full one can be emptied.
pub async fn disk_is_limited(lab: &mut Lab) {
    let cell = lab
        .launch_with(Limits {
            disk_bytes: 64 * MIB,
            ..Limits::default()
        })
        .await;
    for dir in [
        "/workspace",
        "/tmp",
        "/usr/local",
        "/root",
        "/var/tmp",
        "/run",
    ] {
        let script = format!(
            "head -c 100000000 /dev/zero > {dir}/full 2>/dev/null; test $(stat -c %s {dir}/full) -lt 70000000 && echo ended; rm {dir}/full; echo x > {dir}/small && cat {dir}/small"
        );
        let ran = cell.sh(&script).await;
        assert_eq!(ran.out(), "ended\nx", "{dir}: {ran:?}");
    }
}

/// A sandbox that waits for its session gets that session's limits.
pub async fn limits_can_be_bound_late(lab: &mut Lab) {
    let first = Limits::default();
    let cell = lab.launch_with(first).await;
    let late = Limits {
        memory_bytes: 64 * MIB,
        ..first
    };
    cell.sandbox.set_limits(&late).expect("less");
    cell.sandbox.set_limits(&first).expect("more");
    let script = "python3 -c 'x = b\"x\" * (200 << 20); print(len(x) >> 20)'";
    assert_eq!(cell.sh(script).await.out(), "200");
    let fewer = Limits { pids: 40, ..first };
    if lab.driver.can_change_limits(&first, &fewer) {
        cell.sandbox.set_limits(&fewer).expect("fewer processes");
        let count = "for n in $(seq 60); do sleep 67.5 & done; wait";
        let exec = Exec {
            timeout_ms: 2000,
            ..sh(count)
        };
        let ran = cell.host().exec(exec).await.expect("it runs");
        assert!(!ran.stderr.is_empty(), "{ran:?}");
    }
}
