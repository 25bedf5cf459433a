//! Unpacked layers of images, as the launcher has them: one directory each, named by its DiffID, whose
//! files belong to a range of user numbers that nothing on the host has.
//!
//! A layer's bytes are hostile, so root does not read them. The process that does ([`confined`]) is
//! made for that one layer: it sees no file but the directory it fills, has no network, is root in a
//! user namespace of its own only, and ends with its work or at a deadline.
//!
//! ```text
//! layers/<sha256>/fs/         the files
//! layers/<sha256>/layer.json  what they take
//! layers/.new-…  layers/.old-…  being made, being removed; of a launcher that died
//! ```

mod confined;

use super::make_private_dir;
use super::{rootfs, sys, uids};
use crate::{DriverError, LayerSize};
use k8e_image::{Compression, LAYER_BYTES_MAX, LAYER_ENTRIES_MAX, LayerLimits};
use k8e_model::Digest;
use rustix::fs::{Gid, Uid};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const FILES: &str = "fs";
const SIZE: &str = "layer.json";
const NEW: &str = ".new-";
const OLD: &str = ".old-";

/// What must stay free on the disk when a layer is unpacked.
const FREE_BYTES_MIN: u64 = 512 * 1024 * 1024;

/// The layers of one data directory.
#[derive(Debug)]
pub(crate) struct Layers {
    dir: PathBuf,
    /// An empty directory to mount on.
    stage: PathBuf,
    /// Why layers cannot be used here, if they cannot.
    unusable: Option<String>,
}

// === impl Layers ===

impl Layers {
    /// Removes what a launcher before left half done.
    pub(crate) fn open(
        dir: PathBuf,
        stage: PathBuf,
        trial: BorrowedFd<'_>,
    ) -> Result<Self, DriverError> {
        make_private_dir(&dir)?;
        let idmap = rootfs::overlay_takes_idmapped_layers() && rootfs::can_idmap(trial, &dir);
        let unusable = (!idmap).then(|| {
            "images cannot be used here: the file system of the data directory cannot show other owners (idmapped mounts); use Linux 5.19 or newer with ext4, xfs or btrfs".to_owned()
        });
        let layers = Self {
            dir,
            stage,
            unusable,
        };
        for entry in layers.entries()? {
            let name = entry.to_string_lossy().into_owned();
            if name.starts_with(NEW) || name.starts_with(OLD) {
                // What cannot be removed now is tried again by the next start.
                let _ = layers.discard(Some(layers.dir.join(name)));
            }
        }
        Ok(layers)
    }

    /// What a layer takes; none when it is not there.
    pub(crate) fn find(&self, diff_id: &Digest) -> Option<LayerSize> {
        let size = fs::read(self.layer(diff_id).join(SIZE)).ok()?;
        serde_json::from_slice(&size).ok()
    }

    /// The directories of layers that are all there, for one overlay: without those that a layer above
    /// hides altogether, or that are there once more above, which overlayfs refuses.
    pub(crate) fn paths(&self, diff_ids: &[Digest]) -> Result<Vec<PathBuf>, DriverError> {
        self.usable()?;
        let mut shown = Vec::new();
        let mut hidden = false;
        // From the top: a layer adds nothing below itself.
        for diff_id in diff_ids.iter().rev() {
            let path = self.layer(diff_id).join(FILES);
            if !path.is_dir() {
                return Err(DriverError::Unusable(format!(
                    "layer {diff_id} of the session's image is not on this machine: create the template again"
                )));
            }
            if hidden || shown.contains(&path) {
                continue;
            }
            // overlayfs does not look at this attribute of the root of a layer.
            hidden = k8e_image::is_opaque(&path);
            shown.push(path);
        }
        shown.reverse();
        Ok(shown)
    }

    /// Those that are there, in order, behind `after`.
    pub(crate) fn list(
        &self,
        after: Option<&Digest>,
        max: usize,
    ) -> Result<Vec<Digest>, DriverError> {
        let digest = |name: std::ffi::OsString| format!("sha256:{}", name.to_str()?).parse().ok();
        let mut all: Vec<Digest> = self.entries()?.into_iter().filter_map(digest).collect();
        all.sort_unstable();
        let behind = all
            .into_iter()
            .filter(|layer| after.is_none_or(|after| layer > after));
        Ok(behind.take(max).collect())
    }

    /// Unpacks a layer, unless it is there. On failure nothing is left. In a process of its own, which
    /// ends with the launcher: it holds the data directory's lock, and may take minutes.
    pub(crate) fn unpack(
        &self,
        blob: OwnedFd,
        diff_id: &Digest,
        compression: Compression,
        bytes_max: u64,
    ) -> Result<LayerSize, DriverError> {
        sys::end_with_parent().map_err(DriverError::step("prepare", "the unpacker"))?;
        self.usable()?;
        if let Some(size) = self.find(diff_id) {
            return Ok(size);
        }
        let limits = LayerLimits {
            bytes_max: bytes_max.min(LAYER_BYTES_MAX).min(self.room()?),
            entries_max: LAYER_ENTRIES_MAX,
        };
        let pid = rustix::process::getpid().as_raw_nonzero();
        let new = self
            .dir
            .join(format!("{NEW}{pid}-{}", &diff_id.hex()[..12]));
        let _ = fs::remove_dir_all(&new);
        let made = self.make(&new, blob, diff_id, compression, limits);
        if made.is_err() {
            self.discard(Some(new))?;
        }
        made
    }

    fn make(
        &self,
        new: &Path,
        blob: OwnedFd,
        diff_id: &Digest,
        compression: Compression,
        limits: LayerLimits,
    ) -> Result<LayerSize, DriverError> {
        let step = |what: &'static str, path: &Path| {
            DriverError::step::<io::Error>(what, path.display().to_string())
        };
        let files = new.join(FILES);
        fs::create_dir(new).map_err(step("make", new))?;
        fs::create_dir(&files).map_err(step("make", &files))?;
        fs::set_permissions(&files, Permissions::from_mode(0o755))
            .map_err(step("chmod", &files))?;
        let (uid, gid) = (Uid::from_raw(uids::LAYERS), Gid::from_raw(uids::LAYERS));
        rustix::fs::chown(&files, Some(uid), Some(gid))
            .map_err(|error| step("chown", &files)(error.into()))?;
        let unpacked = confined::unpack(blob, compression, &files, &self.stage, limits)?;
        if unpacked.diff_id != *diff_id {
            return Err(DriverError::Refused(format!(
                "the layer is {} when uncompressed, not {diff_id}: the image is damaged, or lies",
                unpacked.diff_id
            )));
        }
        let size = LayerSize {
            bytes: unpacked.bytes,
            entries: unpacked.entries,
        };
        let text = serde_json::to_vec(&size).map_err(io::Error::other);
        let path = new.join(SIZE);
        text.and_then(|text| {
            fs::write(&path, text)?;
            fs::File::open(&path)?.sync_all()
        })
        .map_err(step("write", &path))?;
        let layer = self.layer(diff_id);
        match fs::rename(new, &layer) {
            // Somebody else unpacked the same.
            Err(_) if self.find(diff_id).is_some() => self.discard(Some(new.to_owned()))?,
            done => done.map_err(step("keep", &layer))?,
        }
        let kept = fs::File::open(&self.dir).and_then(|dir| dir.sync_all());
        kept.map_err(step("keep", &layer))?;
        Ok(size)
    }

    /// Takes a layer out of the store; what is left of it, if anything.
    pub(crate) fn set_aside(&self, diff_id: &Digest) -> Result<Option<PathBuf>, DriverError> {
        let layer = self.layer(diff_id);
        // One that is still being removed may have been unpacked again meanwhile.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_nanos();
        let old = self.dir.join(format!("{OLD}{now}-{}", diff_id.hex()));
        match fs::rename(&layer, &old) {
            Ok(()) => Ok(Some(old)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                let step = DriverError::step("remove", layer.display().to_string());
                Err(step(error))
            }
        }
    }

    /// Removes what is left. Links in it are not followed.
    pub(crate) fn discard(&self, path: Option<PathBuf>) -> Result<(), DriverError> {
        let Some(path) = path else { return Ok(()) };
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done.map_err(DriverError::step("remove", path.display().to_string())),
        }
    }

    fn usable(&self) -> Result<(), DriverError> {
        match &self.unusable {
            None => Ok(()),
            Some(why) => Err(DriverError::Unusable(why.clone())),
        }
    }

    /// What may still be written here.
    fn room(&self) -> Result<u64, DriverError> {
        let stat = rustix::fs::statvfs(&self.dir)
            .map_err(DriverError::step("stat", self.dir.display().to_string()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        free.checked_sub(FREE_BYTES_MIN).ok_or_else(|| {
            DriverError::Exhausted(format!(
                "the disk of the data directory has {} MiB left: free some space or move --data-dir",
                free >> 20
            ))
        })
    }

    fn entries(&self) -> Result<Vec<std::ffi::OsString>, DriverError> {
        let entries = fs::read_dir(&self.dir)
            .map_err(DriverError::step("list", self.dir.display().to_string()))?;
        Ok(entries.flatten().map(|entry| entry.file_name()).collect())
    }

    fn layer(&self, diff_id: &Digest) -> PathBuf {
        self.dir.join(diff_id.hex())
    }
}
