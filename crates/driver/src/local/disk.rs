//! The writable layer: a sparse ext4 image per sandbox, so that its size is a hard limit on any host
//! file system, removing it is one unlink, and the host never walks a tree that hostile code made.
//!
//! An empty file system is made once for each size and kept as the few blocks mkfs wrote; a new
//! image is a hole with these blocks in it.

use super::sys;
use crate::DriverError;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

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

/// Empty file systems kept in memory, some hundred kilobytes each; the least used goes.
const TEMPLATES_MAX: usize = 8;

/// Makes images.
#[derive(Debug)]
pub(crate) struct Disks {
    dir: PathBuf,
    /// By size, the last used first.
    templates: Mutex<VecDeque<(u64, Arc<Template>)>>,
}

#[derive(Debug)]
struct Template {
    blocks: Vec<(u64, Vec<u8>)>,
}

// === impl Disks ===

impl Disks {
    /// `dir` holds nothing but what is made here.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DriverError> {
        fs::create_dir_all(&dir).map_err(DriverError::step("make", dir.display().to_string()))?;
        Ok(Self {
            dir,
            templates: Mutex::default(),
        })
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
        image.set_len(bytes).map_err(step())?;
        for (offset, data) in &template.blocks {
            image.write_all_at(data, *offset).map_err(step())?;
        }
        Ok(())
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

    fn template(&self, bytes: u64) -> Result<Arc<Template>, DriverError> {
        // Held while mkfs runs: who asks for the same size meanwhile wants its result.
        let mut templates = self
            .templates
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let template = match templates.iter().position(|(size, _)| *size == bytes) {
            Some(at) => templates.remove(at).expect("it was just found").1,
            None => Arc::new(make(&self.dir, bytes)?),
        };
        templates.push_front((bytes, Arc::clone(&template)));
        templates.truncate(TEMPLATES_MAX);
        Ok(template)
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

fn make(dir: &Path, bytes: u64) -> Result<Template, DriverError> {
    let scratch = dir.join("mkfs");
    let _ = fs::remove_dir_all(&scratch);
    let made = make_in(&scratch, bytes);
    let _ = fs::remove_dir_all(&scratch);
    made
}

fn make_in(scratch: &Path, bytes: u64) -> Result<Template, DriverError> {
    let content = scratch.join("content");
    for sub in [UPPER, WORK, WORKSPACE] {
        let path = content.join(sub);
        fs::create_dir_all(&path).map_err(DriverError::step("make", path.display().to_string()))?;
    }
    let image = scratch.join("image");
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
    read_blocks(&image).map_err(DriverError::step("read", image.display().to_string()))
}

fn read_blocks(image: &Path) -> io::Result<Template> {
    use rustix::fs::{SeekFrom, seek};
    let file = File::open(image)?;
    let (mut blocks, mut total, mut at) = (Vec::new(), 0, 0);
    loop {
        let start = match seek(&file, SeekFrom::Data(at)) {
            Err(rustix::io::Errno::NXIO) => return Ok(Template { blocks }),
            start => start?,
        };
        let end = seek(&file, SeekFrom::Hole(start))?;
        total += end - start;
        if total > TEMPLATE_DATA_BYTES_MAX {
            return Err(io::Error::other(
                "the file system below keeps no holes: an empty image has too much data",
            ));
        }
        let mut data = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
        file.read_exact_at(&mut data, start)?;
        // mkfs also writes zeroes; a hole reads the same.
        if data.iter().any(|byte| *byte != 0) {
            blocks.push((start, data));
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
