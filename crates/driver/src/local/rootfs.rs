//! Builds the sandbox's file system in the mount namespace of the process that will live in it.
//!
//! Runs as the host's root before the user namespace is entered: what is mounted here belongs to
//! the host's user namespace, so root inside can neither unmount nor remount any of it.

use super::disk::{UPPER, WORK, WORKSPACE};
use super::skeleton::Layer;
use super::sys;
use crate::DriverError;
use rustix::fs::{CWD, FileType, Gid, Mode, Uid};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What the file system is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rootfs {
    /// An empty directory of the host to build in.
    pub(super) stage: PathBuf,
    /// The `host` template's own part.
    pub(super) skeleton: PathBuf,
    /// The host's directories above it.
    pub(super) layers: Vec<Layer>,
    /// What can be written.
    pub(super) disk: Disk,
    /// For `/dev/shm`; memory is counted either way, this is only what `df` says.
    pub(super) shm_bytes: u64,
    /// What the host calls root inside.
    pub(super) uid_base: u32,
    /// Whether the layers' file systems can show other owners; else theirs are shown as nobody.
    pub(super) idmap: bool,
}

/// Where changes go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Disk {
    /// An ext4 image.
    Image(PathBuf),
    /// Memory, where there are no loop devices.
    Memory(u64),
}

/// Of the machine's few thousand terminals, what one sandbox may have.
const TERMINALS_MAX: u32 = 256;

/// Device nodes that are safe for anybody.
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

/// Parts of /proc that tell of or act on the whole machine. Most are the host root's anyway.
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

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

// === impl Rootfs ===

impl Rootfs {
    /// Mounts everything and makes it `/`. Nothing of the host is reachable afterwards.
    pub(super) fn enter(&self, userns: BorrowedFd<'_>) -> Result<(), DriverError> {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)
            .map_err(DriverError::step("make private", "/"))?;
        self.stage()?;
        self.mount_disk()?;
        self.overlay("skeleton", &self.skeleton, Path::new("root"), userns)?;
        for layer in &self.layers {
            self.overlay(
                &layer.name,
                &layer.host,
                &Path::new("root").join(&layer.name),
                userns,
            )?;
        }
        let workspace = clone_mount(&Path::new("rw").join(WORKSPACE))?;
        attach(&workspace, Path::new("root/workspace"))?;
        mount("proc", "root/proc", "proc", SAFE | MountFlags::NOEXEC, "")?;
        self.mount_dev()?;
        rustix::process::chdir("root").map_err(DriverError::step("enter", "the new root"))?;
        rustix::process::pivot_root(".", ".")
            .map_err(DriverError::step("pivot to", "the new root"))?;
        rustix::mount::unmount(".", UnmountFlags::DETACH)
            .map_err(DriverError::step("leave", "the old root"))?;
        rustix::process::chdir("/").map_err(DriverError::step("enter", "/"))?;
        Ok(())
    }

    /// A file system of our own to hang the parts in. Relative paths from here on: a data directory's
    /// name may hold what overlay options cannot.
    fn stage(&self) -> Result<(), DriverError> {
        mount("k8e", &self.stage, "tmpfs", SAFE, "mode=0700,size=1m")?;
        rustix::process::chdir(&self.stage)
            .map_err(DriverError::step("enter", self.stage.display().to_string()))?;
        make_dir(Path::new("rw"))?;
        make_dir(Path::new("low"))?;
        make_dir(Path::new("root"))
    }

    fn mount_disk(&self) -> Result<(), DriverError> {
        match &self.disk {
            Disk::Image(image) => {
                let step =
                    || DriverError::step::<std::io::Error>("attach", image.display().to_string());
                let file = fs::File::options()
                    .read(true)
                    .write(true)
                    .open(image)
                    .map_err(step())?;
                let (device, path) = sys::attach_loop(file.as_fd()).map_err(step())?;
                let mounted = mount(
                    &path,
                    "rw",
                    "ext4",
                    SAFE | MountFlags::NOATIME,
                    "noinit_itable",
                );
                drop(device);
                mounted?;
            }
            Disk::Memory(bytes) => {
                mount(
                    "k8e",
                    "rw",
                    "tmpfs",
                    SAFE,
                    &format!("mode=0700,size={bytes}"),
                )?;
                for dir in [UPPER, WORK, WORKSPACE] {
                    make_dir(&Path::new("rw").join(dir))?;
                }
            }
        }
        self.give(&Path::new("rw").join(WORKSPACE))
    }

    /// Mounts `lower` at `target`, read-only beneath a writable layer.
    fn overlay(
        &self,
        name: &str,
        lower: &Path,
        target: &Path,
        userns: BorrowedFd<'_>,
    ) -> Result<(), DriverError> {
        let low = Path::new("low").join(name);
        make_dir(&low)?;
        let tree = clone_mount(lower)?;
        let read_only = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
        sys::set_mount_attributes(tree.as_fd(), read_only, self.idmap.then_some(userns)).map_err(
            DriverError::step("set attributes of", lower.display().to_string()),
        )?;
        attach(&tree, &low)?;
        let (upper, work) = (
            Path::new("rw").join(UPPER).join(name),
            Path::new("rw").join(WORK).join(name),
        );
        make_dir(&upper)?;
        make_dir(&work)?;
        self.give(&upper)?;
        let options =
            format!("lowerdir=low/{name},upperdir=rw/{UPPER}/{name},workdir=rw/{WORK}/{name}");
        mount("overlay", target, "overlay", SAFE, &options)
    }

    fn mount_dev(&self) -> Result<(), DriverError> {
        let base = self.uid_base;
        let dev = Path::new("root/dev");
        mount(
            "dev",
            dev,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NOEXEC,
            &format!("mode=0755,size=64k,uid={base},gid={base}"),
        )?;
        // Device nodes keep the mode they are made with.
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
            self.give(&path)?;
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
        let options = format!("mode=1777,size={},uid={base},gid={base}", self.shm_bytes);
        mount("shm", dev.join("shm"), "tmpfs", SAFE, &options)
    }

    /// Makes root inside the owner.
    fn give(&self, path: &Path) -> Result<(), DriverError> {
        let (uid, gid) = (Uid::from_raw(self.uid_base), Gid::from_raw(self.uid_base));
        rustix::fs::chown(path, Some(uid), Some(gid))
            .map_err(DriverError::step("chown", path.display().to_string()))
    }
}

/// Hides and write-protects what /proc shows of the machine. After [`Rootfs::enter`].
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

/// Whether overlays can be made of such mounts: from Linux 5.19 on.
pub(super) fn overlay_takes_idmapped_layers() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (5, 19)
}

/// Whether the file system of the host's programs can show other owners.
pub(super) fn can_idmap(userns: BorrowedFd<'_>, path: &Path) -> bool {
    clone_mount(path)
        .is_ok_and(|tree| sys::set_mount_attributes(tree.as_fd(), 0, Some(userns)).is_ok())
}

fn mount(
    source: impl rustix::path::Arg,
    target: impl AsRef<Path>,
    kind: &str,
    flags: MountFlags,
    options: &str,
) -> Result<(), DriverError> {
    let target = target.as_ref();
    let options = CString::new(options).expect("options are formatted from names and numbers");
    rustix::mount::mount(source, target, kind, flags, options.as_c_str()).map_err(
        DriverError::step("mount", format!("{kind} on {}", target.display())),
    )
}

fn clone_mount(path: &Path) -> Result<OwnedFd, DriverError> {
    rustix::mount::open_tree(
        CWD,
        path,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
    .map_err(DriverError::step(
        "clone the mount of",
        path.display().to_string(),
    ))
}

fn attach(tree: &OwnedFd, target: &Path) -> Result<(), DriverError> {
    rustix::mount::move_mount(
        tree,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(DriverError::step("mount on", target.display().to_string()))
}

fn make_dir(path: &Path) -> Result<(), DriverError> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
        Err(rustix::io::Errno::EXIST) => Ok(()),
        done => done.map_err(DriverError::step("make", path.display().to_string())),
    }
}
