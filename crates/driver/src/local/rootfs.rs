//! Root file system of a sandbox (overlayfs, idmapped mounts) in a mount namespace of its own: the host's programs
//! beneath a writable layer, `/workspace`, and nothing else of the host.
//!
//! Runs as the host's root: what is mounted here belongs to the host's user namespace, so root
//! inside can neither unmount nor remount any of it. It is gone with the last process in it.

use super::cgroup::io::DiskNumber;
use super::disk::{UPPER, WORK, WORKSPACE};
use super::skeleton::Layer;
use super::userns::{disk_namespace, mapped_namespace};
use super::{sys, uids};
use crate::DriverError;
use rustix::fs::{CWD, Gid, Mode, Uid};
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
pub(crate) struct Rootfs {
    /// An empty directory of the host to build in.
    pub(crate) stage: PathBuf,
    /// The `host` template's own part.
    pub(crate) skeleton: PathBuf,
    /// The host's directories above it.
    pub(crate) layers: Vec<Layer>,
    /// An image that takes the place of all of that.
    pub(crate) image: Option<ImageRoot>,
    /// What can be written.
    pub(crate) disk: Disk,
    /// Size of `/dev/shm`; memory is charged either way, this is only what `df` shows.
    pub(crate) shm_bytes: u64,
    /// What the host calls root inside.
    pub(crate) uid_base: u32,
    /// What root inside is on the disk: another uid where the disk is the copy of another sandbox's.
    pub(crate) disk_uid_base: u32,
    /// Whether the layers' file systems can show other owners; else theirs are shown as nobody.
    pub(crate) idmap: bool,
}

/// The root file system of an image, beneath the writable layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageRoot {
    /// What every sandbox has, above the image: directories that are mounted on, name resolution.
    pub(crate) front: PathBuf,
    /// Directories with the image's layers, the lowest first. Their files belong to
    /// [`uids::LAYERS`].
    pub(crate) layers: Vec<PathBuf>,
}

/// User namespaces by which files are shown as the sandbox's own. Made before the process that mounts them, which may
/// be in another PID namespace.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    /// Of the layers of an image.
    layers: Option<OwnedFd>,
    /// Of the disk, where it is the copy of another sandbox's.
    disk: Option<OwnedFd>,
}

/// In the writable layer: what is above an image.
const IMAGE: &str = "image";

/// Where changes go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Disk {
    /// An ext4 image on a loop device.
    Image(PathBuf),
    /// tmpfs of so many bytes, where there are no loop devices.
    Memory(u64),
}

/// Name of the overlay over the template's skeleton.
pub(crate) const SKELETON: &str = "skeleton";

/// Devices and set-user-id files of a sandbox have no effect on the host.
pub(crate) const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

// === impl Rootfs ===

impl Rootfs {
    /// Mounts everything below the stage, which becomes the working directory; the file system is its `root`.
    ///
    /// `owners` is what [`Rootfs::owners`] made.
    pub(crate) fn mount(&self, userns: BorrowedFd<'_>, owners: &Owners) -> Result<(), DriverError> {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)
            .map_err(DriverError::step("make private", "/"))?;
        self.stage()?;
        self.mount_disk(owners.disk.as_ref())?;
        match (&self.image, &owners.layers) {
            (Some(image), Some(owners)) => self.mount_image(image, userns, owners.as_fd())?,
            _ => self.mount_host(userns)?,
        }
        let workspace = clone_mount(&Path::new("rw").join(WORKSPACE))?;
        attach(&workspace, Path::new("root/workspace"))
    }

    /// The user namespaces by which its files are shown as its own.
    pub(crate) fn owners(&self) -> Result<Owners, DriverError> {
        let above = |owners: OwnedFd| {
            sys::move_up(owners).map_err(DriverError::step("prepare", "a launch"))
        };
        let layers = self.image.as_ref();
        let layers = layers.map(|_| mapped_namespace(uids::LAYERS, self.uid_base));
        let copied = self.disk_uid_base != self.uid_base;
        let disk = copied.then(|| disk_namespace(self.disk_uid_base, self.uid_base));
        Ok(Owners {
            layers: layers.transpose()?.map(above).transpose()?,
            disk: disk.transpose()?.map(above).transpose()?,
        })
    }

    fn mount_host(&self, userns: BorrowedFd<'_>) -> Result<(), DriverError> {
        self.overlay(SKELETON, &self.skeleton, Path::new("root"), userns)?;
        for layer in &self.layers {
            self.overlay(
                &layer.name,
                &layer.host,
                &Path::new("root").join(&layer.name),
                userns,
            )?;
        }
        Ok(())
    }

    /// All layers of an image in one overlay. Its first directory is ours, so that nothing an image has
    /// can be where something is mounted or written from outside.
    fn mount_image(
        &self,
        image: &ImageRoot,
        userns: BorrowedFd<'_>,
        layer_owners: BorrowedFd<'_>,
    ) -> Result<(), DriverError> {
        lower("front", &image.front, Some(userns))?;
        let mut lowers = "low/front".to_owned();
        for (number, layer) in image.layers.iter().enumerate().rev() {
            let name = number.to_string();
            lower(&name, layer, Some(layer_owners))?;
            lowers.push_str(":low/");
            lowers.push_str(&name);
        }
        self.writable(IMAGE)?;
        // Whiteouts of layers are attributes that whoever unpacked them could set.
        let options = format!(
            "lowerdir={lowers},upperdir=rw/{UPPER}/{IMAGE},workdir=rw/{WORK}/{IMAGE},userxattr"
        );
        mount("overlay", "root", "overlay", SAFE, &options)?;
        // Commands may run as a user that the image names.
        let workspace = Path::new("rw").join(WORKSPACE);
        rustix::fs::chmod(&workspace, Mode::from_raw_mode(0o777))
            .map_err(DriverError::step("chmod", workspace.display().to_string()))
    }

    /// The disks whose I/O is limited, once it is mounted: its own loop device, the disk of the image
    /// is on, and those of the host's programs.
    pub(crate) fn disks(&self) -> Vec<DiskNumber> {
        let image = match &self.disk {
            Disk::Image(image) => Some(image.as_path()),
            Disk::Memory(_) => None,
        };
        let layers = match &self.image {
            Some(image) => image.layers.iter().map(PathBuf::as_path).collect(),
            None => {
                let layers = self.layers.iter();
                layers.map(|layer| layer.host.as_path()).collect::<Vec<_>>()
            }
        };
        let paths = [Path::new("rw")].into_iter().chain(image).chain(layers);
        let mut disks: Vec<_> = paths.filter_map(DiskNumber::below).collect();
        disks.sort_unstable();
        disks.dedup();
        disks
    }

    /// Mounts a tmpfs as the stage. Relative paths from here on: a data directory's
    /// name may hold what overlay options cannot.
    fn stage(&self) -> Result<(), DriverError> {
        mount("k8e", &self.stage, "tmpfs", SAFE, "mode=0700,size=1m")?;
        rustix::process::chdir(&self.stage)
            .map_err(DriverError::step("enter", self.stage.display().to_string()))?;
        make_dir(Path::new("rw"))?;
        make_dir(Path::new("low"))?;
        make_dir(Path::new("root"))
    }

    fn mount_disk(&self, owners: Option<&OwnedFd>) -> Result<(), DriverError> {
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
                // The image does not outlive its sandbox: `fsync` in it does not wait for the host's disk.
                let mounted = mount(
                    &path,
                    "rw",
                    "ext4",
                    SAFE | MountFlags::NOATIME,
                    "noinit_itable,nobarrier",
                );
                drop(device);
                mounted?;
                if let Some(owners) = owners {
                    show_as_own(Path::new("rw"), owners)?;
                }
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
        self::lower(name, lower, self.idmap.then_some(userns))?;
        self.writable(name)?;
        let options =
            format!("lowerdir=low/{name},upperdir=rw/{UPPER}/{name},workdir=rw/{WORK}/{name}");
        mount("overlay", target, "overlay", SAFE, &options)
    }

    /// Makes the directories that an overlay writes to.
    fn writable(&self, name: &str) -> Result<(), DriverError> {
        let (upper, work) = (
            Path::new("rw").join(UPPER).join(name),
            Path::new("rw").join(WORK).join(name),
        );
        make_dir(&upper)?;
        make_dir(&work)?;
        self.give(&upper)
    }

    /// Changes the owner to root inside.
    pub(crate) fn give(&self, path: &Path) -> Result<(), DriverError> {
        let (uid, gid) = (Uid::from_raw(self.uid_base), Gid::from_raw(self.uid_base));
        rustix::fs::chown(path, Some(uid), Some(gid))
            .map_err(DriverError::step("chown", path.display().to_string()))
    }
}

/// Puts a mount in the place of what is mounted at `path` that shows its files as the sandbox's own.
fn show_as_own(path: &Path, owners: &OwnedFd) -> Result<(), DriverError> {
    let tree = clone_mount(path)?;
    sys::set_mount_attributes(tree.as_fd(), 0, Some(owners.as_fd()))
        .map_err(DriverError::step("show as its own", "the disk"))?;
    rustix::mount::unmount(path, UnmountFlags::DETACH)
        .map_err(DriverError::step("unmount", path.display().to_string()))?;
    attach(&tree, path)
}

/// Mounts a directory read-only at `low/<name>`, with its owners shown as `owners` says.
fn lower(name: &str, dir: &Path, owners: Option<BorrowedFd<'_>>) -> Result<(), DriverError> {
    let low = Path::new("low").join(name);
    make_dir(&low)?;
    let tree = clone_mount(dir)?;
    let read_only = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    sys::set_mount_attributes(tree.as_fd(), read_only, owners).map_err(DriverError::step(
        "set attributes of",
        dir.display().to_string(),
    ))?;
    attach(&tree, &low)
}

/// Whether overlays can be made of such mounts: from Linux 5.19 on.
pub(crate) fn overlay_takes_idmapped_layers() -> bool {
    kernel_version() >= (5, 19)
}

/// Major and minor version of this kernel; zeroes where they cannot be parsed.
pub(crate) fn kernel_version() -> (u32, u32) {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether the file system of the host's programs supports idmapped mounts.
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
