//! Every driver of this machine does what the list in `testkit` says. Needs root and the built
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
    k8e_testkit::conformance!(super::Local::new("gvisor"));
}

/// A driver of this machine on a data directory of its own.
struct Local {
    kind: &'static str,
    dir: tempfile::TempDir,
    /// Every sandbox it ever had, as far as anybody looked.
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
        Self { kind, dir, seen }
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
