//! The OCI bundle of a sandbox: `config.json` for runsc.
//!
//! Its paths are the same for every sandbox: [`super::child`] mounts everything there, in a separate
//! mount namespace.

use super::child::Task;
use super::socket::NAMES;
use crate::local::uids::RANGE;
use crate::local::{HOSTNAME, OPEN_FILES_MAX, caps, shm_bytes};
use k8e_model::Limits;
use serde_json::json;

/// Path of the root file system in the bundle.
pub(super) const ROOT: &str = "/run/root";

/// Paths inside the sandbox: the guest executable, and the directory of its socket.
pub(super) const GUEST: &str = "/run/k8e/k8e-guest";
pub(super) const SHARED: &str = "/run/k8e/shared";

/// The contents of `config.json`.
pub(super) fn config(limits: &Limits, uid_base: u32, task: Task) -> String {
    let [socket, next] = NAMES.map(|name| format!("{SHARED}/{name}"));
    let args = match task {
        Task::Serve => vec![GUEST, "--listen", &socket, &next],
        Task::SelfTest => vec![GUEST, "--self-test"],
    };
    let map = json!([{ "containerID": 0, "hostID": uid_base, "size": RANGE }]);
    let kept = caps::kept_names();
    let own = ["pid", "ipc", "uts", "mount", "user"].map(|kind| json!({ "type": kind }));
    // The network namespace in which runsc is started, which has the veth interface.
    let network = json!({ "type": "network", "path": "/proc/self/ns/net" });
    let namespaces: Vec<_> = own.into_iter().chain([network]).collect();
    let limit = |kind: &str, value: u64| json!({ "type": kind, "soft": value, "hard": value });
    let config = json!({
        "ociVersion": "1.0.2",
        "root": { "path": ROOT, "readonly": false },
        "hostname": HOSTNAME,
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0, "umask": 0o022 },
            "args": args,
            "env": [],
            "cwd": "/",
            "capabilities": {
                "bounding": kept,
                "effective": kept,
                "permitted": kept,
            },
            "noNewPrivileges": true,
            "rlimits": [
                limit("RLIMIT_NOFILE", OPEN_FILES_MAX),
                // RLIMIT_NPROC, counted per user inside; root inside has no capability to exceed it.
                limit("RLIMIT_NPROC", u64::from(limits.pids)),
                limit("RLIMIT_CORE", 0),
            ],
        },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "shm",
                "options": ["nosuid", "nodev", "mode=1777", format!("size={}", shm_bytes(limits))],
            },
        ],
        "linux": {
            "namespaces": namespaces,
            "uidMappings": map,
            "gidMappings": map,
        },
    });
    config.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_inside_is_unprivileged_outside_and_over_the_kernel() {
        let config: serde_json::Value =
            serde_json::from_str(&config(&Limits::default(), 7 << 28, Task::Serve)).unwrap();
        assert_eq!(config["linux"]["uidMappings"][0]["hostID"], 7 << 28);
        assert_eq!(config["process"]["rlimits"][1]["hard"], 256);
        let kept = config["process"]["capabilities"]["bounding"].to_string();
        for power in [
            "SYS_ADMIN",
            "SYS_RESOURCE",
            "NET_ADMIN",
            "SYS_PTRACE",
            "MKNOD",
        ] {
            assert!(!kept.contains(power), "{power}");
        }
    }
}
