//! Resource limits: they are enforced, and sandbox and host stay usable.

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
    // Killed processes count until they are reaped: the limit may still be reached for a moment.
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

/// Of several processes the one that takes too much is killed, which is counted before its end is
/// reported; the others and the sandbox live on.
pub async fn memory_is_limited(lab: &mut Lab) {
    let cell = lab
        .launch_with(Limits {
            memory_bytes: 128 * MIB,
            ..Limits::default()
        })
        .await;
    let fits = cell
        .sh("python3 -c 'x = b\"x\" * (84 << 20); print(len(x) >> 20)'")
        .await;
    assert_eq!(fits.out(), "84", "{fits:?}");
    assert_eq!(cell.sandbox.limit_events().oom_kills, 0);
    cell.sh("echo kept > /workspace/file; setsid sleep 68.5 >/dev/null 2>&1 &")
        .await;
    for kills in 1..=3 {
        let bomb = "exec python3 -c 'x = [bytes([n % 251]) * (8 << 20) for n in range(200)]; print(\"survived\")'";
        let ran = cell.sh(bomb).await;
        assert_eq!(
            (ran.out(), ran.exited.signal),
            (String::new(), 9),
            "{ran:?}"
        );
        let counted = cell.sandbox.limit_events().oom_kills;
        assert!(counted >= kills, "{counted} kills, not {kills}");
        let ran = cell.sh("cat /workspace/file; pgrep -c sleep").await;
        assert_eq!(ran.out(), "kept\n1", "{ran:?}");
    }
}

/// Page cache is reclaimed before a process is OOM-killed, and does not prevent it.
pub async fn page_cache_is_reclaimed_before_oom_kills(lab: &mut Lab) {
    let cell = lab
        .launch_with(Limits {
            memory_bytes: 64 * MIB,
            ..Limits::default()
        })
        .await;
    let ran = cell
        .sh("head -c 300M /dev/zero > file && cat file | wc -c")
        .await;
    assert_eq!(ran.out(), "314572800", "{ran:?}");
    assert_eq!(cell.sandbox.limit_events().oom_kills, 0);
    let bomb = cell.sh("exec tail /dev/zero").await;
    assert_eq!(bomb.exited.signal, 9, "{bomb:?}");
    assert_eq!(cell.sh("echo alive").await.out(), "alive");
}

/// The disk limit is enforced, and a full disk can be emptied.
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

/// A warm sandbox gets the limits of its session when it is claimed.
pub async fn limits_can_be_changed_after_launch(lab: &mut Lab) {
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
