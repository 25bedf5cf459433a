//! Checks of kernel features. Probed by system calls where that needs no root.

use super::{Check, Group, Verdict};
use crate::local::{cgroup, rootfs, sys};
use crate::native::landlock_missing;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;

/// First kernel with `mount_setattr`, which makes the host's directories read-only mounts.
const KERNEL_MIN: (u32, u32) = (5, 12);

/// Namespaces of a sandbox, and their kernel configuration options.
const NAMESPACES: [(&str, &str); 7] = [
    ("user", "CONFIG_USER_NS"),
    ("pid", "CONFIG_PID_NS"),
    ("mnt", "CONFIG_NAMESPACES"),
    ("net", "CONFIG_NET_NS"),
    ("ipc", "CONFIG_IPC_NS"),
    ("uts", "CONFIG_UTS_NS"),
    ("cgroup", "CONFIG_CGROUPS"),
];

pub(super) fn checks() -> Vec<Check> {
    vec![
        root(),
        version(),
        namespaces(),
        file_system("overlay", "CONFIG_OVERLAY_FS", Verdict::Missing),
        mount_api(),
        idmapped_mounts(),
        file_system("ext4", "CONFIG_EXT4_FS", Verdict::Weaker),
        loop_devices(),
        mkfs(),
        control_groups(),
        seccomp(),
        landlock(),
        kvm(),
    ]
}

fn ok(name: &str, found: impl Into<String>) -> Check {
    Check::ok(Group::Kernel, name, found)
}

fn root() -> Check {
    let uid = rustix::process::geteuid();
    let found = ok("root", format!("uid {}", uid.as_raw()));
    if uid.is_root() {
        return found;
    }
    found.with_verdict(
        Verdict::Missing,
        "k8e server needs root: run it, and this command, with sudo",
    )
}

fn version() -> Check {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let found = ok("kernel version", format!("Linux {release}"));
    let (major, minor) = KERNEL_MIN;
    if rootfs::kernel_version() >= KERNEL_MIN {
        return found;
    }
    let fix = format!("use Linux {major}.{minor} or newer; 6.12 has all that is used");
    found.with_verdict(Verdict::Missing, fix)
}

fn namespaces() -> Check {
    let lacks = |(name, _): &&(&str, &str)| !Path::new("/proc/self/ns").join(name).exists();
    let lacking: Vec<_> = NAMESPACES.iter().filter(lacks).collect();
    let names = |all: &[&(&str, &str)]| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        names.join(", ")
    };
    if lacking.is_empty() {
        let all: Vec<_> = NAMESPACES.iter().collect();
        return ok("namespaces", names(&all));
    }
    let configs: Vec<_> = lacking.iter().map(|(_, config)| *config).collect();
    ok("namespaces", format!("without {}", names(&lacking))).with_verdict(
        Verdict::Missing,
        format!("use a kernel with {}", configs.join(", ")),
    )
}

/// A file system that the kernel has, or that mount loads as a module.
fn file_system(name: &'static str, config: &str, otherwise: Verdict) -> Check {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if known
        .lines()
        .any(|line| line.trim_start().trim_start_matches("nodev").trim() == name)
    {
        return ok(name, "in the kernel");
    }
    if has_module(name) {
        return ok(name, "a module, loaded when it is used");
    }
    ok(name, "not in the kernel, and not a module").with_verdict(
        otherwise,
        format!("modprobe {name}, or use a kernel with {config}"),
    )
}

fn has_module(name: &str) -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let list = Path::new("/lib/modules").join(release).join("modules.dep");
    let modules = fs::read_to_string(list).unwrap_or_default();
    let file = format!("/{name}.ko");
    modules
        .lines()
        .filter_map(|line| line.split(':').next())
        .any(|path| path.contains(&file))
}

/// Both system calls get invalid arguments, so that only the error tells whether the kernel has them.
fn mount_api() -> Check {
    let name = "mount API";
    let fix = "use Linux 5.12 or newer; in a container, one whose seccomp profile allows them";
    let tree = rustix::mount::open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLOEXEC);
    let tree = match tree {
        Ok(tree) => tree,
        Err(error) => {
            return ok(name, format!("open_tree: {error}")).with_verdict(Verdict::Missing, fix);
        }
    };
    match sys::set_mount_attributes(tree.as_fd(), 0, None) {
        Err(error) if error.raw_os_error() == Some(Errno::NOSYS.raw_os_error()) => {
            ok(name, format!("mount_setattr: {error}")).with_verdict(Verdict::Missing, fix)
        }
        // Without root it fails with EPERM, which shows that it exists.
        _ => ok(name, "open_tree, move_mount, mount_setattr"),
    }
}

/// Whether the file system of `/usr` supports them is probed by the launcher.
fn idmapped_mounts() -> Check {
    let name = "idmapped mounts";
    if rootfs::overlay_takes_idmapped_layers() {
        return ok(name, "the kernel has them, also below overlays");
    }
    ok(name, "not below overlays in this kernel").with_verdict(
        Verdict::Weaker,
        "programs cannot be installed over inside; use Linux 5.19 or newer",
    )
}

fn loop_devices() -> Check {
    let name = "loop devices";
    if Path::new("/dev/loop-control").exists() {
        return ok(name, "/dev/loop-control");
    }
    ok(name, "no /dev/loop-control").with_verdict(
        Verdict::Weaker,
        "what sandboxes write is kept in memory; modprobe loop, or give the container the device",
    )
}

fn mkfs() -> Check {
    let name = "mkfs.ext4";
    let directories = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    let mut paths = directories.iter().map(|dir| Path::new(dir).join(name));
    match paths.find(|path| path.exists()) {
        Some(path) => ok(name, path.display().to_string()),
        None => ok(name, "not found").with_verdict(
            Verdict::Weaker,
            "what sandboxes write is kept in memory; install e2fsprogs",
        ),
    }
}

fn control_groups() -> Check {
    let name = "control groups";
    match cgroup::describe() {
        Ok(found) => ok(name, found),
        Err(error) => ok(name, "not usable").with_verdict(Verdict::Missing, error.to_string()),
    }
}

fn seccomp() -> Check {
    let name = "seccomp";
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        return ok(name, "filters");
    }
    ok(name, "no filters").with_verdict(Verdict::Missing, "use a kernel with CONFIG_SECCOMP_FILTER")
}

fn landlock() -> Check {
    match landlock_missing() {
        None => ok(
            "Landlock",
            "files, device ioctls, signals and abstract sockets",
        ),
        Some(lacking) => {
            let (found, fix) = lacking.split_once("; ").unwrap_or((&lacking, ""));
            ok("Landlock", found).with_verdict(Verdict::Weaker, fix)
        }
    }
}

fn kvm() -> Check {
    let (name, device) = ("/dev/kvm", Path::new("/dev/kvm"));
    if device.exists() {
        return ok(name, "there; nothing in this version needs it");
    }
    ok(name, "not there; nothing in this version needs it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_has_is_missing() {
        let check = file_system("no-such-fs", "CONFIG_NO_SUCH_FS", Verdict::Missing);
        assert_eq!(check.verdict, Verdict::Missing);
        assert!(check.fix.contains("CONFIG_NO_SUCH_FS"));
        assert_eq!(
            file_system("proc", "", Verdict::Missing).verdict,
            Verdict::Ok
        );
    }
}
