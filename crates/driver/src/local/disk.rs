//! Disk images: the writable layer is a sparse ext4 image per sandbox, so that its size is a hard limit on any
//! host file system, removal is one unlink, and the host never walks a tree that hostile code made.
//!
//! An empty file system is made once for each size and kept, as the few blocks mkfs wrote, in a
//! sparse file; a new image is a hole with these blocks in it.

use super::sys;
use crate::DriverError;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

/// Directories in the image: upper and work directories of overlays, and `/workspace`.
pub(crate) const UPPER: &str = "upper";
pub(crate) const WORK: &str = "work";
pub(crate) const WORKSPACE: &str = "workspace";

/// Bound on the data of an empty file system: metadata of the largest image stays far below.
const TEMPLATE_DATA_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Name of the image in a sandbox's directory.
pub(crate) const FILE: &str = "disk.img";

/// Deadline for the kernel to let go of the image of a killed sandbox, which it does in the background.
const DETACH_WAIT: Duration = Duration::from_secs(20);
const DETACH_PAUSE: Duration = Duration::from_millis(2);

/// Minimum of free disk space for a launch: below it the sandbox could not write and the store would fail.
pub(crate) const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Sizes are rounded up to a multiple: clients choose them, and each size costs a run of mkfs.
const SIZE_GRID_BYTES: u64 = 16 * 1024 * 1024;

/// Empty file systems that are kept (LRU cache), some hundred kilobytes each.
const TEMPLATES_MAX: usize = 8;

/// Their file extension; the name is the size in bytes and the version.
const TEMPLATE_EXTENSION: &str = "img";

/// Version of the contents of an empty file system: 2 has the directories of overlays.
const TEMPLATE_VERSION: u32 = 2;

/// Makes disk images. Safe to use from several processes at once.
#[derive(Debug)]
pub(crate) struct Disks {
    dir: PathBuf,
    /// Names of the overlays whose directories every image has.
    overlays: Vec<String>,
}

// === impl Disks ===

impl Disks {
    /// `dir` holds nothing but what is made here. Every image has the directories of
    /// these overlays: making them for each sandbox is slower than the copy of a block.
    pub(crate) fn open(dir: PathBuf, overlays: Vec<String>) -> Result<Self, DriverError> {
        fs::create_dir_all(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(Self { dir, overlays })
    }

    /// Writes a new, empty image of `bytes` to `path`.
    pub(crate) fn create(&self, path: &Path, bytes: u64) -> Result<(), DriverError> {
        self.check_free()?;
        let bytes = bytes.next_multiple_of(SIZE_GRID_BYTES);
        let template = self.template(bytes)?;
        let step = || DriverError::step::<io::Error>("write", path.display().to_string());
        let image = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(step())?;
        copy_blocks(&template, &image, bytes).map_err(step())
    }

    fn check_free(&self) -> Result<(), DriverError> {
        check_free(&self.dir, 0)
    }

    /// The empty file system of a size, made if it is not cached.
    fn template(&self, bytes: u64) -> Result<File, DriverError> {
        let path = self
            .dir
            .join(format!("{bytes}-{TEMPLATE_VERSION}.{TEMPLATE_EXTENSION}"));
        if let Ok(file) = File::options().read(true).write(true).open(&path) {
            // The mtime is the time of last use for eviction; errors do no harm.
            let _ = file.set_modified(SystemTime::now());
            return Ok(file);
        }
        self.forget_templates();
        // Two processes that make the same one do not interfere; the last rename wins.
        let scratch = tempdir(&self.dir)?;
        let made = make_in(&scratch, bytes, &self.overlays).and_then(|file| {
            let kept = fs::rename(scratch.join(IMAGE), &path);
            kept.map_err(DriverError::step("keep", path.display().to_string()))?;
            Ok(file)
        });
        let _ = fs::remove_dir_all(&scratch);
        made
    }

    /// Evicts the least recently used ones.
    fn forget_templates(&self) {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let templates = entries.filter_map(|entry| {
            let path = entry.path();
            let used = entry.metadata().and_then(|meta| meta.modified()).ok()?;
            (path.extension()? == TEMPLATE_EXTENSION).then_some((used, path))
        });
        let mut templates: Vec<_> = templates.collect();
        templates.sort();
        let surplus = (templates.len() + 1).saturating_sub(TEMPLATES_MAX);
        for (_, path) in templates.into_iter().take(surplus) {
            let _ = fs::remove_file(path);
        }
    }

    /// Whether an image can be attached to a loop device here, or why not.
    pub(crate) fn try_loop_device(&self) -> Result<(), DriverError> {
        let image = self.dir.join("probe.img");
        let _ = fs::remove_file(&image);
        self.create(&image, SIZE_GRID_BYTES)?;
        let file = File::options().read(true).write(true).open(&image);
        let attached = file.and_then(|file| sys::attach_loop(file.as_fd()));
        let _ = fs::remove_file(&image);
        attached
            .map(drop)
            .map_err(DriverError::step("attach", "a loop device"))
    }
}

/// Whether so many bytes can be written below `dir` without filling its disk.
pub(crate) fn check_free(dir: &Path, bytes: u64) -> Result<(), DriverError> {
    let stat =
        rustix::fs::statvfs(dir).map_err(DriverError::step("stat", dir.display().to_string()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let needed = FREE_BYTES_MIN.saturating_add(bytes);
    if free < needed {
        return Err(DriverError::Exhausted(format!(
            "the disk of the data directory has {} MiB left, a sandbox needs {} MiB: free some space or move --data-dir",
            free >> 20,
            needed >> 20
        )));
    }
    Ok(())
}

/// Waits until no loop device has the image: what its sandbox wrote last is in the file then.
pub(crate) fn wait_detached(image: &Path) -> Result<(), DriverError> {
    let deadline = Instant::now() + DETACH_WAIT;
    while is_attached(image) {
        if Instant::now() > deadline {
            let error = io::Error::from(io::ErrorKind::TimedOut);
            return Err(DriverError::step(
                "wait for the release of",
                image.display().to_string(),
            )(error));
        }
        std::thread::sleep(DETACH_PAUSE);
    }
    Ok(())
}

fn is_attached(image: &Path) -> bool {
    loop_device(image).is_some()
}

/// The loop device that has the image.
fn loop_device(image: &Path) -> Option<PathBuf> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let has_image = |device: &fs::DirEntry| {
        fs::read(device.path().join("loop/backing_file"))
            .is_ok_and(|backing| backing.trim_ascii_end() == image.as_os_str().as_encoded_bytes())
    };
    let device = devices.into_iter().find(has_image)?;
    Some(Path::new("/dev").join(device.file_name()))
}

/// Writes back the file system of an attached image to which nothing is written meanwhile: afterwards the file is
/// whole.
pub(crate) fn write_back(image: &Path) -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("write back", image.display().to_string());
    let device = loop_device(image).ok_or_else(|| step()(io::ErrorKind::NotFound.into()))?;
    let device = File::open(device).map_err(step())?;
    sys::flush_block_device(device.as_fd()).map_err(step())
}

/// Makes `to` a sparse copy of an image that is not attached, or that was just [written back](write_back): shares its
/// blocks where the file system can.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("copy", from.display().to_string());
    let source = File::open(from).map_err(step())?;
    let meta = source.metadata().map_err(step())?;
    check_free(to.parent().unwrap_or(to), meta.blocks().saturating_mul(512))?;
    let copy = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)
        .map_err(step())?;
    if rustix::fs::ioctl_ficlone(&copy, &source).is_ok() {
        return Ok(());
    }
    copy_data(&source, &copy, meta.len()).map_err(step())
}

/// Copies what is no hole, in the kernel.
fn copy_data(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{SeekFrom, copy_file_range, seek};
    to.set_len(bytes)?;
    let mut at = 0;
    loop {
        let mut start = match seek(from, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            start => start?,
        };
        let end = seek(from, SeekFrom::Hole(start))?;
        let mut target = start;
        while start < end {
            let rest = usize::try_from(end - start).map_err(io::Error::other)?;
            if copy_file_range(from, Some(&mut start), to, Some(&mut target), rest)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        at = end;
    }
}

/// A new directory in `dir`.
fn tempdir(dir: &Path) -> Result<PathBuf, DriverError> {
    let path = dir.join(format!(
        "mkfs-{}",
        rustix::process::getpid().as_raw_nonzero()
    ));
    // Left by a process that died and had the same pid.
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).map_err(DriverError::step("make", path.display().to_string()))?;
    Ok(path)
}

/// In a scratch directory: the contents of the new file system.
const IMAGE: &str = "image";

fn make_in(scratch: &Path, bytes: u64, overlays: &[String]) -> Result<File, DriverError> {
    let content = scratch.join("content");
    let below = |parent: &'static str| {
        overlays
            .iter()
            .map(move |name| Path::new(parent).join(name))
    };
    let dirs = [UPPER, WORK, WORKSPACE].map(PathBuf::from).into_iter();
    for sub in dirs.chain(below(UPPER)).chain(below(WORK)) {
        let path = content.join(sub);
        fs::create_dir_all(&path).map_err(DriverError::step("make", path.display().to_string()))?;
    }
    let image = scratch.join("mkfs");
    let step = || DriverError::step::<io::Error>("make", image.display().to_string());
    File::create_new(&image)
        .and_then(|file| file.set_len(bytes))
        .map_err(step())?;
    // No journal, no checksums, nothing reserved: the image does not outlive its sandbox's kernel.
    let output = Command::new("mkfs.ext4")
        .args([
            "-q",
            "-F",
            "-m",
            "0",
            "-b",
            "4096",
            "-O",
            "^has_journal,^resize_inode,^metadata_csum,uninit_bg",
        ])
        .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d"])
        .args([&content, &image])
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .map_err(DriverError::step("run", "mkfs.ext4 (install e2fsprogs)"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(DriverError::step("run", "mkfs.ext4")(io::Error::other(
            said,
        )));
    }
    let compact = || -> io::Result<File> {
        let made = File::open(&image)?;
        let path = scratch.join(IMAGE);
        let mut options = File::options();
        let kept = options.read(true).write(true).create_new(true).open(path)?;
        copy_blocks(&made, &kept, bytes)?;
        Ok(kept)
    };
    compact().map_err(DriverError::step("read", image.display().to_string()))
}

/// Makes `to` a sparse copy of `from` with `bytes`, with as few blocks as possible.
fn copy_blocks(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{SeekFrom, seek};
    to.set_len(bytes)?;
    let (mut total, mut at) = (0, 0);
    loop {
        let start = match seek(from, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            start => start?,
        };
        let end = seek(from, SeekFrom::Hole(start))?;
        total += end - start;
        if total > TEMPLATE_DATA_BYTES_MAX {
            return Err(io::Error::other(
                "the file system below keeps no holes: an empty image has too much data",
            ));
        }
        let mut data = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        from.read_exact_at(&mut data, start)?;
        // mkfs also writes zeroes; a hole reads the same.
        if data.iter().any(|byte| *byte != 0) {
            to.write_all_at(&data, start)?;
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_an_empty_file_system_and_mostly_a_hole() {
        let dir = tempfile::tempdir().unwrap();
        let disks = Disks::open(dir.path().join("templates"), vec!["usr".to_owned()]).unwrap();
        let image = dir.path().join("disk.img");
        disks.create(&image, 1 << 30).unwrap();
        let meta = fs::metadata(&image).unwrap();
        assert_eq!(meta.len(), 1 << 30);
        assert!(
            meta.blocks() * 512 < 16 << 20,
            "{} bytes",
            meta.blocks() * 512
        );
        let check = Command::new("e2fsck")
            .args(["-n", "-f"])
            .arg(&image)
            .env("PATH", "/usr/sbin:/sbin")
            .output()
            .unwrap();
        assert!(
            check.status.success(),
            "{}",
            String::from_utf8_lossy(&check.stdout)
        );
        assert!(
            disks.create(&image, 1 << 30).is_err(),
            "an image is never overwritten"
        );
    }
}
