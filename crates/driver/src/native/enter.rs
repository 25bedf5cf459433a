//! `pivot_root` into a mounted root file system, with `/dev` and a `/proc` that shows
//! little of the machine.

use crate::DriverError;
use crate::local::rootfs::{Rootfs, SAFE, attach, clone_mount, make_dir, mount};
use crate::local::sys;
use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{MountFlags, UnmountFlags};
use std::os::fd::AsFd as _;
use std::path::Path;

/// Limit of PTYs (devpts `max=`) of one sandbox; the machine has a few thousand.
const TERMINALS_MAX: u32 = 256;

/// Harmless device nodes.
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Parts of /proc that show or change state of the whole machine. Most need the host's root anyway.
const HIDDEN_FILES: [&str; 9] = [
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/kallsyms",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
];
const HIDDEN_DIRS: [&str; 3] = ["/proc/acpi", "/proc/scsi", "/proc/fs"];
const READ_ONLY: [&str; 3] = ["/proc/bus", "/proc/irq", "/proc/sys"];

/// Completes a mounted root file system and makes it `/`. No file of the host is reachable afterwards.
pub(super) fn enter(rootfs: &Rootfs) -> Result<(), DriverError> {
    mount("proc", "root/proc", "proc", SAFE | MountFlags::NOEXEC, "")?;
    mount_dev(rootfs)?;
    rustix::process::chdir("root").map_err(DriverError::step("enter", "the new root"))?;
    rustix::process::pivot_root(".", ".").map_err(DriverError::step("pivot to", "the new root"))?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)
        .map_err(DriverError::step("leave", "the old root"))?;
    rustix::process::chdir("/").map_err(DriverError::step("enter", "/"))?;
    Ok(())
}

/// Masks and write-protects parts of /proc. After [`enter`].
pub(super) fn mask_proc() -> Result<(), DriverError> {
    for path in HIDDEN_FILES.iter().filter(|path| Path::new(path).exists()) {
        attach(&clone_mount(Path::new("/dev/null"))?, Path::new(path))?;
    }
    for path in HIDDEN_DIRS.iter().filter(|path| Path::new(path).exists()) {
        mount(
            "none",
            *path,
            "tmpfs",
            SAFE | MountFlags::RDONLY | MountFlags::NOEXEC,
            "size=4k",
        )?;
    }
    for path in READ_ONLY.iter().filter(|path| Path::new(path).exists()) {
        let tree = clone_mount(Path::new(path))?;
        let attributes = libc::MOUNT_ATTR_RDONLY
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOEXEC;
        sys::set_mount_attributes(tree.as_fd(), attributes, None)
            .map_err(DriverError::step("protect", *path))?;
        attach(&tree, Path::new(path))?;
    }
    Ok(())
}

fn mount_dev(rootfs: &Rootfs) -> Result<(), DriverError> {
    let base = rootfs.uid_base;
    let dev = Path::new("root/dev");
    mount(
        "dev",
        dev,
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        &format!("mode=0755,size=64k,uid={base},gid={base}"),
    )?;
    // mknod with the final mode; the umask does not apply.
    let umask = rustix::process::umask(Mode::empty());
    for (name, major, minor) in DEVICES {
        let path = dev.join(name);
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(
            CWD,
            &path,
            FileType::CharacterDevice,
            mode,
            rustix::fs::makedev(major, minor),
        )
        .map_err(DriverError::step("make", path.display().to_string()))?;
        rootfs.give(&path)?;
    }
    rustix::process::umask(umask);
    for (name, target) in DEVICE_LINKS {
        let path = dev.join(name);
        rustix::fs::symlink(target, &path)
            .map_err(DriverError::step("make", path.display().to_string()))?;
    }
    make_dir(&dev.join("pts"))?;
    make_dir(&dev.join("shm"))?;
    let tty = base + 5;
    let options = format!("newinstance,ptmxmode=0666,mode=0620,gid={tty},max={TERMINALS_MAX}");
    mount(
        "devpts",
        dev.join("pts"),
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        &options,
    )?;
    let options = format!("mode=1777,size={},uid={base},gid={base}", rootfs.shm_bytes);
    mount("shm", dev.join("shm"), "tmpfs", SAFE, &options)
}
