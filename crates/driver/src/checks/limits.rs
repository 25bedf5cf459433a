//! Checks of limits: sysctls, open files, free memory and disk.

use super::{Check, Group, Verdict, existing};
use crate::local::disk::FREE_BYTES_MIN;
use crate::local::skeleton;
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::path::Path;

/// The server's default limit of sandboxes.
const SANDBOXES: u64 = 1000;

/// Minimum of `kernel.pid_max`: a few processes and threads for each of [`SANDBOXES`].
const PIDS_MIN: u64 = 65_536;

/// Minimum of open files for the server: a few per session, more per call and client.
const DESCRIPTORS_MIN: u64 = 16_384;

/// Minimum of inotify instances and watches per user, as a build tool uses. Each sandbox has its own users.
const INOTIFY_INSTANCES_MIN: u64 = 64;
const INOTIFY_WATCHES_MIN: u64 = 8192;

/// Minimum of free memory: one sandbox at its default limit, and the server.
const MEMORY_BYTES_MIN: u64 = 1 << 30;

/// Minimum of free disk: a handful of sandboxes that write something.
const DISK_BYTES_GOOD: u64 = 8 << 30;

pub(super) fn checks(data_dir: &Path) -> Vec<Check> {
    vec![
        user_namespaces(),
        sysctl(
            "process ids",
            "kernel/pid_max",
            PIDS_MIN,
            "fewer sandboxes fit",
        ),
        open_files(),
        sysctl(
            "inotify instances",
            "fs/inotify/max_user_instances",
            INOTIFY_INSTANCES_MIN,
            "programs inside that watch files fail",
        ),
        sysctl(
            "inotify watches",
            "fs/inotify/max_user_watches",
            INOTIFY_WATCHES_MIN,
            "programs inside that watch files fail",
        ),
        memory(),
        disk(data_dir),
        hidden(data_dir),
    ]
}

fn ok(name: &str, found: impl Into<String>) -> Check {
    Check::ok(Group::Limits, name, found)
}

fn user_namespaces() -> Check {
    let name = "user namespaces";
    let setting = "user/max_user_namespaces";
    match read(setting) {
        Some(0) => {
            ok(name, "none allowed").with_verdict(Verdict::Missing, set(setting, SANDBOXES * 2))
        }
        _ => sysctl(name, setting, SANDBOXES, "fewer sandboxes fit"),
    }
}

/// A sysctl that should be at least `min`.
fn sysctl(name: &str, setting: &str, min: u64, cost: &str) -> Check {
    match read(setting) {
        Some(value) if value >= min => ok(name, value.to_string()),
        Some(value) => {
            let fix = format!("{cost}; {}", set(setting, min));
            ok(name, value.to_string()).with_verdict(Verdict::Weaker, fix)
        }
        None => ok(name, format!("/proc/sys/{setting} cannot be read"))
            .with_verdict(Verdict::Unknown, ""),
    }
}

fn set(setting: &str, value: u64) -> String {
    format!("sysctl -w {}={value}", setting.replace('/', "."))
}

fn read(setting: &str) -> Option<u64> {
    let text = fs::read_to_string(Path::new("/proc/sys").join(setting)).ok()?;
    text.trim().parse().ok()
}

/// The server raises its soft limit to the hard limit.
fn open_files() -> Check {
    let name = "open files";
    match getrlimit(Resource::Nofile).maximum {
        None => ok(name, "no limit"),
        Some(max) if max >= DESCRIPTORS_MIN => ok(name, max.to_string()),
        Some(max) => ok(name, max.to_string()).with_verdict(
            Verdict::Weaker,
            format!("fewer sessions and clients fit; ulimit -Hn {DESCRIPTORS_MIN}, or LimitNOFILE= of its systemd unit"),
        ),
    }
}

fn memory() -> Check {
    let name = "free memory";
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |field: &str| -> Option<u64> {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    let (Some(free), Some(all)) = (kib("MemAvailable:"), kib("MemTotal:")) else {
        return ok(name, "/proc/meminfo cannot be read").with_verdict(Verdict::Unknown, "");
    };
    let found = ok(name, format!("{} of {} MiB", free >> 10, all >> 10));
    if free << 10 >= MEMORY_BYTES_MIN {
        return found;
    }
    found.with_verdict(
        Verdict::Weaker,
        "few sandboxes fit and pools stay small; free some, or set a small --default-memory",
    )
}

fn disk(data_dir: &Path) -> Check {
    let name = "free disk";
    let dir = existing(data_dir);
    let Ok(stat) = rustix::fs::statvfs(dir) else {
        let found = format!("{} cannot be read", dir.display());
        return ok(name, found).with_verdict(Verdict::Unknown, "");
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let found = format!("{} MiB for {}", free >> 20, data_dir.display());
    match free {
        DISK_BYTES_GOOD.. => ok(name, found),
        FREE_BYTES_MIN.. => ok(name, found).with_verdict(
            Verdict::Weaker,
            "few sandboxes can write much; free some space or move --data-dir",
        ),
        _ => ok(name, found).with_verdict(
            Verdict::Missing,
            format!(
                "a sandbox needs {} MiB; free some space or move --data-dir",
                FREE_BYTES_MIN >> 20
            ),
        ),
    }
}

/// The data directory must not be below a directory that the template mounts into every sandbox.
fn hidden(data_dir: &Path) -> Check {
    let name = "data directory";
    let found = ok(name, data_dir.display().to_string());
    let real = existing(data_dir).canonicalize();
    let real = real.unwrap_or_else(|_| data_dir.to_owned());
    let layers = skeleton::layers();
    match layers.iter().find(|layer| real.starts_with(&layer.host)) {
        None => found,
        Some(layer) => found.with_verdict(
            Verdict::Missing,
            format!(
                "every sandbox can read {}; choose another --data-dir",
                layer.host.display()
            ),
        ),
    }
}
