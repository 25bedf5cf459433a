//! Builds a sandbox's file system in a mount namespace of its own: the host's programs read-only
//! beneath a writable layer, `/workspace`, and nothing else of the host.
//!
//! Runs as the host's root: what is mounted here belongs to the host's user namespace, so root
//! inside can neither unmount nor remount any of it. It is gone with the last process in it.

use super::cgroup::io::DiskNumber;
use super::disk::{UPPER, WORK, WORKSPACE};
use super::skeleton::Layer;
use super::sys;
use crate::DriverError;
use rustix::fs::{CWD, Gid, Mode, Uid};
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What the file system is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rootfs {
    /// An empty directory of the host to build in.
    pub(crate) stage: PathBuf,
    /// The `host` template's own part.
    pub(crate) skeleton: PathBuf,
    /// The host's directories above it.
    pub(crate) layers: Vec<Layer>,
    /// What can be written.
    pub(crate) disk: Disk,
    /// For `/dev/shm`; memory is counted either way, this is only what `df` says.
    pub(crate) shm_bytes: u64,
    /// What the host calls root inside.
    pub(crate) uid_base: u32,
    /// Whether the layers' file systems can show other owners; else theirs are shown as nobody.
    pub(crate) idmap: bool,
}

/// Where changes go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Disk {
    /// An ext4 image.
    Image(PathBuf),
    /// Memory, where there are no loop devices.
    Memory(u64),
}

/// No device and no set-user-id file of a sandbox means anything.
pub(crate) const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

// === impl Rootfs ===

impl Rootfs {
    /// Mounts everything below the stage, which becomes the working directory; the file system is its `root`.
    pub(crate) fn mount(&self, userns: BorrowedFd<'_>) -> Result<(), DriverError> {
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
        attach(&workspace, Path::new("root/workspace"))
    }

    /// The disks that are read and written for it, once it is mounted: its own, the one that the image
    /// is on, and those of the host's programs.
    pub(crate) fn disks(&self) -> Vec<DiskNumber> {
        let image = match &self.disk {
            Disk::Image(image) => Some(image.as_path()),
            Disk::Memory(_) => None,
        };
        let layers = self.layers.iter().map(|layer| layer.host.as_path());
        let paths = [Path::new("rw")].into_iter().chain(image).chain(layers);
        let mut disks: Vec<_> = paths.filter_map(DiskNumber::below).collect();
        disks.sort_unstable();
        disks.dedup();
        disks
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
                // It does not outlive its sandbox: no `fsync` in it need wait for the host's disk.
                let mounted = mount(
                    &path,
                    "rw",
                    "ext4",
                    SAFE | MountFlags::NOATIME,
                    "noinit_itable,nobarrier",
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

    /// Makes root inside the owner.
    pub(crate) fn give(&self, path: &Path) -> Result<(), DriverError> {
        let (uid, gid) = (Uid::from_raw(self.uid_base), Gid::from_raw(self.uid_base));
        rustix::fs::chown(path, Some(uid), Some(gid))
            .map_err(DriverError::step("chown", path.display().to_string()))
    }
}

/// Whether overlays can be made of such mounts: from Linux 5.19 on.
pub(crate) fn overlay_takes_idmapped_layers() -> bool {
    kernel_version() >= (5, 19)
}

/// The first two numbers of this kernel's; zeroes where there are none.
pub(crate) fn kernel_version() -> (u32, u32) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether the file system of the host's programs can show other owners.
pub(crate) fn can_idmap(userns: BorrowedFd<'_>, path: &Path) -> bool {
    clone_mount(path)
        .is_ok_and(|tree| sys::set_mount_attributes(tree.as_fd(), 0, Some(userns)).is_ok())
}

pub(crate) fn mount(
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

pub(crate) fn clone_mount(path: &Path) -> Result<OwnedFd, DriverError> {
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

pub(crate) fn attach(tree: &OwnedFd, target: &Path) -> Result<(), DriverError> {
    rustix::mount::move_mount(
        tree,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )
    .map_err(DriverError::step("mount on", target.display().to_string()))
}

pub(crate) fn make_dir(path: &Path) -> Result<(), DriverError> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
        Err(rustix::io::Errno::EXIST) => Ok(()),
        done => done.map_err(DriverError::step("make", path.display().to_string())),
    }
}
