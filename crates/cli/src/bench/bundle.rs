//! The least that an OCI runtime needs to run a program of the host: no image, no download.

use crate::failure::Failure;
use serde_json::json;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What a program needs to start; those that this machine has.
const HOST_DIRS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "etc"];

/// Where the runtime puts its own.
const MADE_DIRS: [&str; 2] = ["proc", "dev"];

/// A directory with bundles.
pub(super) struct Bundles {
    dir: PathBuf,
    host_dirs: Vec<&'static str>,
}

// === impl Bundles ===

impl Bundles {
    /// Makes a root of nothing but mount points, and a bundle for each of `programs`.
    pub(super) fn make(dir: &Path, programs: &[(&str, &[&str])]) -> Result<Self, Failure> {
        let has = |name: &&str| Path::new("/").join(name).is_dir();
        let bundles = Self {
            dir: dir.to_owned(),
            host_dirs: HOST_DIRS.into_iter().filter(has).collect(),
        };
        bundles
            .write(programs)
            .map_err(|e| Failure::io("make a container to compare with", &e))?;
        Ok(bundles)
    }

    /// A directory with a `config.json`.
    pub(super) fn bundle(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The `/` of all of them.
    pub(super) fn root(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    /// What of the host is mounted into it.
    pub(super) fn host_dirs(&self) -> impl Iterator<Item = String> {
        self.host_dirs.iter().map(|name| format!("/{name}"))
    }

    fn write(&self, programs: &[(&str, &[&str])]) -> io::Result<()> {
        for name in self.host_dirs.iter().chain(&MADE_DIRS) {
            fs::create_dir_all(self.root().join(name))?;
        }
        for (name, args) in programs {
            fs::create_dir_all(self.bundle(name))?;
            let config = config(&self.root(), self.host_dirs(), args);
            fs::write(self.bundle(name).join("config.json"), config.to_string())?;
        }
        Ok(())
    }
}

/// Namespaces, the host's programs read-only, and no more: what is left out makes it quicker.
fn config(
    root: &Path,
    host_dirs: impl Iterator<Item = String>,
    args: &[&str],
) -> serde_json::Value {
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "mode=755", "size=64k"],
        }),
    ];
    mounts.extend(host_dirs.map(|dir| {
        json!({ "destination": dir, "type": "bind", "source": dir, "options": ["rbind", "ro"] })
    }));
    let namespaces = ["pid", "network", "ipc", "uts", "mount"];
    json!({
        "ociVersion": "1.0.2",
        "root": { "path": root, "readonly": true },
        "hostname": "bench",
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "args": args,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
        },
        "mounts": mounts,
        "linux": { "namespaces": namespaces.map(|kind| json!({ "type": kind })) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_runs_the_hosts_programs_and_cannot_change_them() {
        let dir = tempfile::tempdir().unwrap();
        let bundles = Bundles::make(dir.path(), &[("once", &["/bin/true"])]).unwrap();
        let text = fs::read(bundles.bundle("once").join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(config["process"]["args"], json!(["/bin/true"]));
        let mounts = config["mounts"].as_array().unwrap();
        let usr = mounts.iter().find(|mount| mount["destination"] == "/usr");
        let expected = json!({
            "destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]
        });
        assert_eq!(usr.unwrap(), &expected);
        for mount in mounts {
            let point = mount["destination"].as_str().unwrap();
            let point = bundles.root().join(point.trim_start_matches('/'));
            assert!(point.is_dir(), "{}", point.display());
        }
        let root = PathBuf::from(config["root"]["path"].as_str().unwrap());
        assert_eq!(root, bundles.root());
    }
}
