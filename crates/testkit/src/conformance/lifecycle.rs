//! Lifecycle of sandboxes: adoption after a restart, destruction, sweeping, freezing.

use super::{Cell, Lab};
use k8e_model::Limits;
use std::collections::HashSet;
use std::time::Duration;

/// After a restart the driver adopts the sandbox with its processes and files.
pub async fn sandboxes_outlive_the_server(lab: &mut Lab) {
    let Cell { id, sandbox } = {
        let cell = lab.launch().await;
        cell.sh("echo kept > /workspace/file; setsid sleep 64.5 >/dev/null 2>&1 &")
            .await;
        cell
    };
    drop(sandbox);
    lab.restart();
    let kept = lab.driver.sweep(&HashSet::from([id.clone()])).await;
    assert_eq!(kept.expect("swept"), []);
    let sandbox = lab
        .driver
        .adopt(&id, &Limits::default())
        .await
        .expect("adopted");
    let cell = Cell {
        id,
        sandbox: sandbox.expect("it lives"),
    };
    assert_eq!(cell.sh("cat /workspace/file").await.out(), "kept");
    cell.host().wait_for("64.5", 1).await;
    cell.sandbox.destroy().await.expect("destroyed");
    assert!(
        lab.driver
            .adopt(&cell.id, &Limits::default())
            .await
            .expect("looked for")
            .is_none()
    );
}

/// `destroy` leaves nothing on the host, also when called twice and with processes and files inside.
pub async fn destroying_leaves_nothing(lab: &mut Lab) {
    let cell = lab.launch().await;
    assert!(
        !lab.subject.traces().is_empty(),
        "traces are looked for in the wrong place"
    );
    cell.sh("setsid sleep 65.5 >/dev/null 2>&1 & head -c 5000000 /dev/zero > /tmp/x; mkdir -p /tmp/a/b/c").await;
    cell.sandbox.destroy().await.expect("destroyed");
    tokio::time::timeout(Duration::from_secs(1), cell.sandbox.died())
        .await
        .expect("it died");
    cell.sandbox.destroy().await.expect("destroyed again");
    lab.no_traces().await;
    assert!(cell.sandbox.guest().hello().await.is_err());
}

/// A sandbox that dies by itself is reported, is not adopted, and can be removed.
pub async fn a_dead_sandbox_is_reported(lab: &mut Lab) {
    let cell = lab.launch().await;
    let early = tokio::time::timeout(Duration::from_millis(200), cell.sandbox.died()).await;
    assert!(early.is_err(), "it lives");
    lab.subject.kill(&cell.id);
    tokio::time::timeout(Duration::from_secs(10), cell.sandbox.died())
        .await
        .expect("noticed");
    cell.sandbox.destroy().await.expect("destroyed");
    let cell = lab.launch().await;
    lab.subject.kill(&cell.id);
    cell.sandbox.died().await;
    drop(cell.sandbox);
    lab.restart();
    assert!(
        lab.driver
            .adopt(&cell.id, &Limits::default())
            .await
            .expect("looked for")
            .is_none()
    );
}

/// `sweep` removes the sandboxes that are not in its list, and keeps the others.
pub async fn unknown_sandboxes_are_swept(lab: &mut Lab) {
    let (kept, dropped, dead) = (lab.launch().await, lab.launch().await, lab.launch().await);
    lab.subject.kill(&dead.id);
    lab.restart();
    let mut expected = vec![dropped.id.clone(), dead.id.clone()];
    expected.sort();
    let keep = HashSet::from([kept.id.clone()]);
    assert_eq!(lab.driver.sweep(&keep).await.expect("swept"), expected);
    tokio::time::timeout(Duration::from_secs(10), dropped.sandbox.died())
        .await
        .expect("it died");
    assert_eq!(kept.sh("echo alive").await.out(), "alive");
    assert_eq!(lab.driver.sweep(&keep).await.expect("swept"), []);
}

/// Concurrent launches and destructions work.
pub async fn concurrent_launches_do_not_interfere(lab: &mut Lab) {
    let launches = (0..6).map(|_| lab.launch());
    let cells = futures::future::join_all(launches).await;
    for (n, cell) in cells.iter().enumerate() {
        cell.sh(&format!("echo {n} > me")).await;
    }
    for (n, cell) in cells.iter().enumerate() {
        assert_eq!(cell.sh("cat me").await.out(), n.to_string());
    }
    let destroyed = cells.iter().map(|cell| cell.sandbox.destroy());
    for done in futures::future::join_all(destroyed).await {
        done.expect("destroyed");
    }
    lab.no_traces().await;
}

/// Every concurrent `destroy` completes, also of sandboxes that are already gone.
pub async fn a_thousand_concurrent_destroys(lab: &mut Lab) {
    const CELLS: usize = 8;
    const DESTROYS: usize = 1000;
    let cells = futures::future::join_all((0..CELLS).map(|_| lab.launch())).await;
    let destroyed = cells.iter().cycle().take(DESTROYS);
    let destroyed = destroyed.map(|cell| cell.sandbox.destroy());
    for done in futures::future::join_all(destroyed).await {
        done.expect("destroyed");
    }
    lab.no_traces().await;
    // The launcher accepts the next launch.
    assert_eq!(lab.launch().await.sh("echo fine").await.out(), "fine");
}

/// A `destroy` whose future is dropped still completes.
pub async fn a_dropped_destroy_still_completes(lab: &mut Lab) {
    let cell = lab.launch().await;
    let asked = tokio::time::timeout(Duration::ZERO, cell.sandbox.destroy()).await;
    assert!(asked.is_err(), "it took no time");
    lab.no_traces().await;
}

/// Sandboxes do not see each other's processes, files or sockets, and mount nothing on the host.
pub async fn nothing_is_shared(lab: &mut Lab) {
    let before = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let (one, two) = (lab.launch().await, lab.launch().await);
    one.sh("echo secret > /tmp/secret; setsid sleep 66.5 >/dev/null 2>&1 &")
        .await;
    assert_eq!(two.host().count("66.5").await, 0);
    assert_eq!(
        two.sh("cat /tmp/secret 2>/dev/null; ls /dev/shm /workspace | grep -v :")
            .await
            .out(),
        ""
    );
    let after = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let new = |line: &&str| line.contains("k8e") && !before.contains(line);
    assert_eq!(after.lines().find(new), None);
}

/// A busy program: counts as fast as it can, into a file.
const COUNTER: &str =
    "setsid sh -c 'n=0; while :; do n=$((n+1)); echo $n > /workspace/n; done' >/dev/null 2>&1 &";

/// The value of the counter, once it is written completely.
async fn counted(cell: &Cell) -> u64 {
    loop {
        let text = cell.sh("cat /workspace/n 2>/dev/null").await;
        if let Ok(n) = text.out().trim().parse() {
            return n;
        }
    }
}

/// No process runs until thaw, also after a restart of the server; then all continue.
pub async fn freeze_stops_all_processes_until_thaw(lab: &mut Lab) {
    let Cell { id, sandbox } = {
        let cell = lab.launch().await;
        cell.sh(COUNTER).await;
        assert!(counted(&cell).await > 0);
        cell
    };
    sandbox.freeze().await.expect("frozen");
    sandbox.freeze().await.expect("frozen twice");
    let answer = tokio::time::timeout(Duration::from_millis(300), sandbox.guest().hello()).await;
    assert!(answer.is_err(), "its guest answers");
    drop(sandbox);
    lab.restart();
    let sandbox = lab
        .driver
        .adopt(&id, &Limits::default())
        .await
        .expect("adopted");
    let sandbox = sandbox.expect("it lives");
    let answer = tokio::time::timeout(Duration::from_millis(300), sandbox.guest().hello()).await;
    assert!(answer.is_err(), "a restart thawed it");
    sandbox.thaw().await.expect("thawed");
    sandbox.thaw().await.expect("thawed twice");
    let cell = Cell { id, sandbox };
    let before = counted(&cell).await;
    while counted(&cell).await <= before {}
    cell.sandbox.freeze().await.expect("frozen");
    let used = cpu_ticks(&cell);
    assert!(
        used.len() > 1,
        "its processes are looked for in the wrong place"
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(cpu_ticks(&cell), used, "something in it runs");
    cell.sandbox.thaw().await.expect("thawed");
    cell.sandbox.destroy().await.expect("destroyed");
}

/// CPU time of every process of a sandbox on the host, in ticks. Processes are found by the name of
/// their cgroup.
fn cpu_ticks(cell: &Cell) -> Vec<(String, u64)> {
    let ticks = |pid: String| {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        groups.contains(cell.id.as_str()).then_some(())?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |n: usize| fields.get(n)?.parse::<u64>().ok();
        // utime and stime are fields 14 and 15 of /proc/PID/stat; the state is field 3.
        Some((pid, field(11)? + field(12)?))
    };
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut all: Vec<_> = names.filter_map(ticks).collect();
    all.sort();
    all
}

/// `destroy` removes a frozen sandbox.
pub async fn a_frozen_sandbox_can_be_destroyed(lab: &mut Lab) {
    let cell = lab.launch().await;
    cell.sh(COUNTER).await;
    cell.sandbox.freeze().await.expect("frozen");
    cell.sandbox.destroy().await.expect("destroyed");
    lab.no_traces().await;
}

/// `sweep` removes a frozen sandbox that was never adopted.
pub async fn a_frozen_sandbox_can_be_swept(lab: &mut Lab) {
    let cell = lab.launch().await;
    cell.sh(COUNTER).await;
    cell.sandbox.freeze().await.expect("frozen");
    lab.restart();
    let swept = lab.driver.sweep(&HashSet::new()).await.expect("swept");
    assert_eq!(swept, [cell.id]);
    lab.no_traces().await;
}
