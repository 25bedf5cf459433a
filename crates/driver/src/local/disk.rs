//! The writable layer: a sparse ext4 image per sandbox, so that its size is a hard limit on any host
//! file system, removing it is one unlink, and the host never walks a tree that hostile code made.
//!
//! An empty file system is made once for each size and kept, as the few blocks mkfs wrote, in a
//! sparse file; a new image is a hole with these blocks in it.

use super::sys;
use crate::DriverError;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

/// In the image: the overlays' changes, their scratch space, and what is kept.
pub(crate) const UPPER: &str = "upper";
pub(crate) const WORK: &str = "work";
pub(crate) const WORKSPACE: &str = "workspace";

/// Journal-less metadata of the largest image we allow stays far below; more is not an empty file system.
const TEMPLATE_DATA_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Below this a sandbox could not even write its first files, and the store could not note it.
pub(crate) const FREE_BYTES_MIN: u64 = 256 * 1024 * 1024;

/// Sizes are rounded up to this: a caller chooses them, and each costs a run of mkfs.
const SIZE_GRID_BYTES: u64 = 16 * 1024 * 1024;

/// Empty file systems that are kept, some hundred kilobytes each; the one that was not used for
/// longest goes.
const TEMPLATES_MAX: usize = 8;

/// What a kept one ends with; its name is its size in bytes.
const TEMPLATE_EXTENSION: &str = "img";

/// Makes images. Several processes may do so at once.
#[derive(Debug)]
pub(crate) struct Disks {
    dir: PathBuf,
}

// === impl Disks ===

impl Disks {
    /// `dir` holds nothing but what is made here.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DriverError> {
        fs::create_dir_all(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(Self { dir })
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
        let stat = rustix::fs::statvfs(&self.dir)
            .map_err(DriverError::step("stat", self.dir.display().to_string()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < FREE_BYTES_MIN {
            return Err(DriverError::Exhausted(format!(
                "the disk of the data directory has {} MiB left, a sandbox needs {} MiB: free some space or move --data-dir",
                free >> 20,
                FREE_BYTES_MIN >> 20
            )));
        }
        Ok(())
    }

    /// The empty file system of a size, made when there is none.
    fn template(&self, bytes: u64) -> Result<File, DriverError> {
        let path = self.dir.join(format!("{bytes}.{TEMPLATE_EXTENSION}"));
        if let Ok(file) = File::options().read(true).write(true).open(&path) {
            // The time tells which was not used for longest; one that is off does no harm.
            let _ = file.set_modified(SystemTime::now());
            return Ok(file);
        }
        self.forget_templates();
        // Two processes that make the same one do so beside each other; the last one stays.
        let scratch = tempdir(&self.dir)?;
        let made = make_in(&scratch, bytes).and_then(|file| {
            let kept = fs::rename(scratch.join(IMAGE), &path);
            kept.map_err(DriverError::step("keep", path.display().to_string()))?;
            Ok(file)
        });
        let _ = fs::remove_dir_all(&scratch);
        made
    }

    /// Makes room for another one.
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

    /// Whether an image can be attached here, or why not.
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

/// A new directory in `dir`.
fn tempdir(dir: &Path) -> Result<PathBuf, DriverError> {
    let path = dir.join(format!(
        "mkfs-{}",
        rustix::process::getpid().as_raw_nonzero()
    ));
    // Of a process that died and had our number.
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).map_err(DriverError::step("make", path.display().to_string()))?;
    Ok(path)
}

/// In a scratch directory: what is to be kept.
const IMAGE: &str = "image";

fn make_in(scratch: &Path, bytes: u64) -> Result<File, DriverError> {
    let content = scratch.join("content");
    for sub in [UPPER, WORK, WORKSPACE] {
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

/// Makes `to` a file of `bytes` that reads like `from` and has as few blocks as can be.
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
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn an_image_is_an_empty_file_system_and_mostly_a_hole() {
        let dir = tempfile::tempdir().unwrap();
        let disks = Disks::open(dir.path().join("templates")).unwrap();
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
