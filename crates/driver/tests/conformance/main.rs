//! Conformance suite of `testkit` for every local driver. Needs root and the built
//! binaries: `cargo xtask test -p k8e-driver`. A driver that does not work here fails.

use k8e_driver::{
    DiskRate, Driver, GvisorDriver, Machine, MachineConfig, NativeDriver, Platform, Probe,
};
use k8e_model::{Limits, SandboxId};
use k8e_testkit::conformance::Subject;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

mod native {
    k8e_testkit::conformance!(super::Local::new("native"));
}

mod gvisor {
    use k8e_model::Limits;
    use k8e_testkit::conformance::{Lab, run};

    k8e_testkit::conformance!(super::Local::new("gvisor"));

    /// Debian's runsc damages a sandbox that it fails to save: it is not asked to.
    #[test]
    fn a_sandbox_that_cannot_be_saved_runs_on() {
        run(
            Box::new(super::Local::new("gvisor")),
            async |lab: &mut Lab| {
                let cell = lab.launch().await;
                let held = "(exec 3>held; rm held; sleep 600) > /dev/null 2>&1 & echo $!";
                let pid = cell.sh(held).await.out();
                let refused = cell.sandbox.save().await.expect_err("an old runsc");
                let why = refused.to_string();
                assert!(why.contains("cannot save sessions"), "{why}");
                assert!(!cell.sandbox.is_saved());
                let ran = cell.sh(&format!("kill -0 {pid} && echo runs")).await;
                assert_eq!(ran.out(), "runs", "{ran:?}");
            },
        );
    }

    /// Where the guest cannot free memory by killing, the server kills the sandbox.
    #[test]
    fn memory_that_the_guest_does_not_free_ends_the_sandbox() {
        run(
            Box::new(super::Local::new("gvisor")),
            async |lab: &mut Lab| {
                let cell = lab.launch().await;
                let ran = cell
                    .sh("head -c 60M /dev/zero > /dev/shm/file; echo $?")
                    .await;
                assert_eq!(ran.out(), "0", "{ran:?}");
                assert_eq!(cell.sandbox.limit_events().oom_kills, 0);
                let less = Limits {
                    memory_bytes: 32 << 20,
                    ..Limits::default()
                };
                cell.sandbox.set_limits(&less).expect("less");
                cell.sandbox.died().await;
                assert!(cell.sandbox.limit_events().oom_kills > 0);
            },
        );
    }
}

/// The newest runsc, which can save sandboxes.
mod newest_gvisor {
    use k8e_driver::Restored;
    use k8e_model::SandboxId;
    use k8e_testkit::conformance::{Cell, Lab, run};
    use std::collections::HashSet;

    /// Counts, with the count in a variable and in a file that has no name any more.
    const COUNTER: &str = "(exec 3>held; rm held; n=0; while :; do n=$((n+1)); echo $n >&3; \
        echo $n > n.new; mv n.new n; sleep 0.01; done) > /dev/null 2>&1 &";

    #[test]
    fn a_saved_sandbox_has_no_process_and_goes_on_where_it_was() {
        let subject = super::Local::new("gvisor").with_newest_runsc();
        let states = subject.dir.path().join("gvisor/states");
        let sandboxes = subject.sandboxes();
        run(Box::new(subject), async move |lab: &mut Lab| {
            let cell = lab.launch().await;
            cell.sh(COUNTER).await;
            let mut count = 0;
            for _ in 0..10 {
                cell.sandbox.save().await.expect("it is saved");
                assert!(cell.sandbox.is_saved());
                assert!(super::names(&sandboxes).is_empty(), "no process, no group");
                assert_eq!(super::names(&states).len(), 1);
                let restored = cell.sandbox.restore().await.expect("it is restored");
                assert_eq!(restored, Restored::Memory);
                assert_eq!(super::names(&states).len(), 1, "kept until it works");
                cell.sandbox.forget_state().await.expect("forgotten");
                assert!(super::names(&states).is_empty());
                let now = cell.sh("cat n; sleep 0.1; cat n").await.out();
                let counts: Vec<u64> = now.lines().map(|n| n.parse().expect("a count")).collect();
                assert!(
                    count < counts[0] && counts[0] < counts[1],
                    "{counts:?} after {count}"
                );
                count = counts[1];
            }
            // Also what is saved leaves no trace.
            cell.sandbox.save().await.expect("it is saved");
            cell.sandbox.destroy().await.expect("it is destroyed");
            assert!(super::names(&states).is_empty());
        });
    }

    /// What a sandbox counts, and that it goes on.
    async fn counts(cell: &Cell) -> u64 {
        let now = cell.sh("cat n; sleep 0.1; cat n").await.out();
        let counts: Vec<u64> = now.lines().map(|n| n.parse().expect("a count")).collect();
        assert!(counts[0] < counts[1], "{counts:?}");
        counts[1]
    }

    async fn copy(cell: &Cell) -> SandboxId {
        let state = SandboxId::random();
        let stopped = cell.sandbox.copy_state(&state).await.expect("it is copied");
        assert!(!stopped.is_zero() && !cell.sandbox.is_saved());
        state
    }

    #[test]
    fn copies_of_a_running_sandbox_go_on_from_the_same_point_and_apart() {
        let subject = super::Local::new("gvisor").with_newest_runsc();
        let states = subject.dir.path().join("gvisor/states");
        let sandboxes = subject.sandboxes();
        run(Box::new(subject), async move |lab: &mut Lab| {
            let cell = lab.launch().await;
            cell.sh(COUNTER).await;
            let files = "echo one > file; install -o 1000 -m 640 file theirs; \
                mkdir -p /opt/made && echo two > /opt/made/file; echo three > /etc/made";
            assert_eq!(cell.sh(files).await.exited.exit_code, 0);
            let before = counts(&cell).await;
            let state = copy(&cell).await;
            assert_eq!(super::names(&states).len(), 1);
            let from = || lab.launch_from(&state);
            let mut copies: Vec<_> = <[Cell; 3]>::from(tokio::join!(from(), from(), from())).into();
            let show = "cat file /opt/made/file /etc/made; stat -c %u:%a file theirs";
            for copy in &copies {
                assert!(counts(copy).await > before);
                let shown = copy.sh(show).await;
                assert_eq!(shown.out(), "one\ntwo\nthree\n0:644\n1000:640", "{shown:?}");
                // Also what the lower layers have, and as another user.
                let write = format!(
                    "echo {id} > file && echo {id} > theirs && mv /etc/made /etc/moved && chown 1000 file && rm -r /opt/made",
                    id = copy.id
                );
                let wrote = copy.sh(&write).await;
                assert_eq!(wrote.exited.exit_code, 0, "{wrote:?}");
            }
            assert_eq!(
                cell.sh(show).await.out(),
                "one\ntwo\nthree\n0:644\n1000:640"
            );
            assert!(counts(&cell).await > before);
            // The copy of a copy; and a copy that is saved and restored.
            let copy = copies.pop().expect("three");
            let second = self::copy(&copy).await;
            let copy_of_copy = lab.launch_from(&second).await;
            copy.sandbox.save().await.expect("it is saved");
            let restored = copy.sandbox.restore().await.expect("it is restored");
            assert_eq!(restored, Restored::Memory);
            copy.sandbox.forget_state().await.expect("forgotten");
            let id = copy.id.to_string();
            for copy in [&copy, &copy_of_copy] {
                assert_eq!(
                    copy.sh("cat file; stat -c %u file").await.out(),
                    format!("{id}\n1000")
                );
                counts(copy).await;
            }
            let all = copies.iter().chain([&cell, &copy, &copy_of_copy]);
            let uids: HashSet<u64> = all
                .map(|cell| super::uid_base(&sandboxes, &cell.id))
                .collect();
            assert_eq!(uids.len(), 5, "each has a uid range of its own");
            lab.driver().remove_state(&state).await.expect("removed");
            lab.driver()
                .remove_state(&state)
                .await
                .expect("removed twice");
            assert_eq!(super::names(&states), [second.to_string()]);
            let keep = [&cell, &copy].map(|cell| cell.id.clone());
            lab.driver().sweep(&keep.into()).await.expect("swept");
            assert!(super::names(&states).is_empty(), "a state is no sandbox");
            counts(&cell).await;
            counts(&copy).await;
        });
    }
}

/// A local driver with a temporary data directory.
struct Local {
    kind: &'static str,
    dir: tempfile::TempDir,
    /// The runsc that it uses, if not the machine's.
    runsc: Option<PathBuf>,
    /// Ids of all sandboxes seen so far.
    seen: Mutex<HashSet<String>>,
}

impl Local {
    fn new(kind: &'static str) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests need root: real namespaces and cgroups"
        );
        let dir = tempfile::Builder::new()
            .prefix("k8e-driver-")
            .tempdir()
            .expect("a directory");
        let seen = Mutex::default();
        Self {
            kind,
            dir,
            runsc: None,
            seen,
        }
    }

    /// With the runsc that `cargo xtask setup` builds.
    fn with_newest_runsc(mut self) -> Self {
        self.runsc = Some(built("K8E_TOOLS_DIR").join("runsc/newest/runsc"));
        self
    }

    fn sandboxes(&self) -> PathBuf {
        self.dir.path().join(self.kind).join("sandboxes")
    }
}

impl Subject for Local {
    fn start(&self) -> Arc<dyn Driver> {
        let machine = Machine::start(MachineConfig {
            data_dir: self.dir.path().to_owned(),
            guest: std::fs::read(built("K8E_GUEST_BIN")).expect("the guest can be read"),
            launcher: built("K8E_BIN"),
            lock: std::fs::File::create(self.dir.path().join("lock"))
                .expect("a lock file")
                .into(),
            memory_disks: false,
            limits_max: Limits {
                memory_bytes: 64 << 30,
                cpu_millis: 64_000,
                pids: 1 << 20,
                disk_bytes: 1 << 40,
            },
            server_gid: 0,
            socket: None,
            disk_rate: DiskRate::default(),
            runsc: self.runsc.clone(),
        })
        .expect("the machine can be used");
        let driver: Arc<dyn Driver> = match self.kind {
            "native" => Arc::new(NativeDriver::start(&machine)),
            _ => Arc::new(GvisorDriver::start(&machine, Platform::Systrap)),
        };
        match driver.probe() {
            Probe::Usable { .. } => driver,
            Probe::Broken { reason } | Probe::Unusable { reason } => {
                panic!("{} cannot be tested: {reason}", self.kind)
            }
        }
    }

    fn kill(&self, id: &SandboxId) {
        let record = self.sandboxes().join(id.as_str()).join("record.json");
        let record = std::fs::read(record).expect("a live sandbox has a record");
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        let pid = record["pid"].as_i64().and_then(|pid| pid.try_into().ok());
        let pid = rustix::process::Pid::from_raw(pid.expect("a pid")).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("killed");
    }

    fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        let ids = names(&self.sandboxes());
        for id in &ids {
            traces.push(format!("directory {id}"));
        }
        let mut seen = self.seen.lock().expect("no test panics here");
        seen.extend(ids);
        for hierarchy in ["", "memory", "cpu", "pids", "freezer"] {
            let groups = Path::new("/sys/fs/cgroup").join(hierarchy).join("k8e");
            for server in names(&groups) {
                let group = groups.join(server);
                let ours = names(&group).into_iter().filter(|name| seen.contains(name));
                traces.extend(ours.map(|id| format!("{hierarchy} cgroup {id}")));
            }
        }
        let dir = self.dir.path().display().to_string();
        for device in names(Path::new("/sys/block")) {
            let file = format!("/sys/block/{device}/loop/backing_file");
            if std::fs::read_to_string(file).is_ok_and(|backing| backing.contains(&dir)) {
                traces.push(format!("loop device {device}"));
            }
        }
        for pid in names(Path::new("/proc")) {
            let mounts = std::fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap_or_default();
            if mounts.contains(&dir) {
                traces.push(format!("mounts of process {pid}"));
            }
        }
        traces
    }
}

/// The first uid of a sandbox's range.
fn uid_base(sandboxes: &Path, id: &SandboxId) -> u64 {
    let record = std::fs::read(sandboxes.join(id.as_str()).join("record.json"));
    let record: serde_json::Value =
        serde_json::from_slice(&record.expect("a live sandbox has a record")).expect("JSON");
    record["uid_base"].as_u64().expect("a uid")
}

fn built(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable).unwrap_or_else(|| {
        panic!("{variable} names a built program: run the tests with `cargo xtask test`")
    });
    PathBuf::from(path)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
