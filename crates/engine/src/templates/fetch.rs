//! Fetches the layers of an image and has them unpacked, one after the other.
//!
//! A layer's bytes go into a file without a name, so a crash leaves none; they are hashed while they
//! are written, and unpacked only when the hash is the one that the manifest names.

use super::TemplateProgress;
use super::source::Source;
use crate::Error;
use crate::sessions::Shared;
use bytes::Bytes;
use k8e_driver::{LayerBlob, LayerSize, LayerStore};
use k8e_image::{Blob, Compression, Hasher, ImageError, Manifest};
use k8e_model::{Digest, Image};
use k8e_store::Store;
use std::fs::{self, File};
use std::io::{self, Seek as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc;

/// In the store's directory: files that blobs are written to.
const BLOBS: &str = "blobs";

/// What must stay free on the disk: sandboxes and the store write there too.
const FREE_BYTES_MIN: u64 = 512 * 1024 * 1024;

/// How often that is looked at, in bytes.
const FREE_CHECKED_EVERY: u64 = 16 * 1024 * 1024;

/// Parts of a blob that wait to be written.
const PARTS_MAX: usize = 16;

/// A client hears of progress about this often, in bytes.
const PROGRESS_EVERY: u64 = 1024 * 1024;

/// A layer whose bytes are here.
pub(super) struct UnpackedSoon<'a> {
    pub(super) file: File,
    pub(super) compression: Compression,
    pub(super) diff_id: &'a Digest,
}

// === impl Shared ===

impl Shared {
    /// Has every layer of an image unpacked; what each takes on disk.
    pub(super) async fn fetch(
        &self,
        layers: &Arc<dyn LayerStore>,
        manifest: &Manifest,
        image: &Image,
        source: &mut dyn Source,
        progress: &mpsc::Sender<TemplateProgress>,
    ) -> Result<Vec<u64>, Error> {
        let count = manifest.layers.len();
        let mut sizes = Vec::with_capacity(count);
        for (number, (layer, diff_id)) in manifest.layers.iter().zip(&image.layers).enumerate() {
            let mut told = TemplateProgress {
                layer: number + 1,
                layers: count,
                bytes: 0,
                bytes_total: layer.blob.bytes,
                unpacking: false,
            };
            let failed = |source| Error::Layer {
                diff_id: diff_id.clone(),
                source,
            };
            let there = {
                // Nobody removes it from here on: it is pinned.
                let _looking = self.templates.collecting.lock().await;
                layers.find(diff_id).await.map_err(failed)?
            };
            let size = match there {
                Some(size) => size,
                None => {
                    self.room(layer.blob.bytes)?;
                    let file = self
                        .fetch_blob(&layer.blob, source, &mut told, progress)
                        .await?;
                    told.unpacking = true;
                    tell(progress, &told);
                    let blob = UnpackedSoon {
                        file,
                        compression: layer.compression,
                        diff_id,
                    };
                    self.unpack(layers, blob).await?
                }
            };
            told.bytes = told.bytes_total;
            told.unpacking = true;
            tell(progress, &told);
            sizes.push(size.bytes);
        }
        Ok(sizes)
    }

    /// Has one layer unpacked that is within the disk space for templates.
    pub(super) async fn unpack(
        &self,
        layers: &Arc<dyn LayerStore>,
        blob: UnpackedSoon<'_>,
    ) -> Result<LayerSize, Error> {
        let _alone = self.templates.unpacking.lock().await;
        let blob = LayerBlob {
            file: blob.file,
            compression: blob.compression,
            diff_id: blob.diff_id.clone(),
            bytes_max: self.room(0)?,
        };
        let diff_id = blob.diff_id.clone();
        let size = layers.unpack(blob).await.map_err(|source| Error::Layer {
            diff_id: diff_id.clone(),
            source,
        })?;
        self.templates.sizes().insert(diff_id, size.bytes);
        Ok(size)
    }

    /// What is left of the disk space for templates: more than `bytes`.
    fn room(&self, bytes: u64) -> Result<u64, Error> {
        let max = self.config.templates_bytes_max;
        let left = max.checked_sub(self.templates.bytes());
        left.filter(|left| *left > 0 && *left >= bytes)
            .ok_or(Error::TemplatesDiskFull { max })
    }

    async fn fetch_blob(
        &self,
        blob: &Blob,
        source: &mut dyn Source,
        told: &mut TemplateProgress,
        progress: &mpsc::Sender<TemplateProgress>,
    ) -> Result<File, Error> {
        let dir = self.store.dir().join(BLOBS);
        let (parts, incoming) = mpsc::channel(PARTS_MAX);
        let writing = tokio::task::spawn_blocking(move || write(&dir, incoming));
        let mut next_told = 0;
        let streamed = async {
            source.layer(blob).await?;
            while let Some(part) = source.next().await? {
                told.bytes = told.bytes.saturating_add(part.len() as u64);
                if told.bytes > blob.bytes {
                    return Err(ImageError::Invalid(
                        "more of a layer came than its manifest says".to_owned(),
                    )
                    .into());
                }
                if told.bytes >= next_told {
                    next_told = told.bytes + PROGRESS_EVERY;
                    tell(progress, told);
                }
                if parts.send(part).await.is_err() {
                    // The writer says why.
                    break;
                }
            }
            Ok::<_, Error>(())
        };
        let streamed = streamed.await;
        drop(parts);
        let written = match writing.await {
            Ok(written) => written,
            Err(error) => Err(io::Error::other(error)),
        };
        streamed?;
        let (file, found) = written.map_err(|source| ImageError::Io {
            operation: "store a layer".to_owned(),
            source,
        })?;
        if found != blob.digest {
            return Err(Error::Image(ImageError::Digest {
                what: "a layer",
                wanted: blob.digest.to_string(),
                found: found.to_string(),
            }));
        }
        Ok(file)
    }
}

/// Removes what a killed server left: a name that it gave a file for a moment.
pub(super) fn remove_leftovers(store: &Store) {
    let entries = fs::read_dir(store.dir().join(BLOBS)).into_iter().flatten();
    for entry in entries.flatten() {
        // The next start tries again.
        let _ = fs::remove_file(entry.path());
    }
}

/// Writes what comes to a file that has no name, from its front; the file and its digest.
fn write(dir: &Path, mut incoming: mpsc::Receiver<Bytes>) -> io::Result<(File, Digest)> {
    let mut file = nameless(dir)?;
    let mut hasher = Hasher::default();
    let mut unchecked = FREE_CHECKED_EVERY;
    while let Some(part) = incoming.blocking_recv() {
        unchecked = unchecked.saturating_add(part.len() as u64);
        if unchecked >= FREE_CHECKED_EVERY {
            unchecked = 0;
            check_free(&file)?;
        }
        hasher.update(&part);
        file.write_all(&part)?;
    }
    file.rewind()?;
    Ok((file, hasher.finish()))
}

fn check_free(file: &File) -> io::Result<()> {
    let stat = rustix::fs::fstatvfs(file)?;
    match stat.f_bavail.saturating_mul(stat.f_frsize) < FREE_BYTES_MIN {
        true => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "the disk of the data directory is nearly full: free some space or move --data-dir",
        )),
        false => Ok(()),
    }
}

/// A file without a name: it is gone with its last descriptor.
pub(super) fn nameless(dir: &Path) -> io::Result<File> {
    fs::create_dir_all(dir)?;
    let mut random = [0; 8];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut random)
        .map_err(|_| io::Error::other("no random numbers"))?;
    let path = dir.join(format!("{:016x}", u64::from_ne_bytes(random)));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// A client that does not read misses some.
fn tell(progress: &mpsc::Sender<TemplateProgress>, told: &TemplateProgress) {
    let _ = progress.try_send(told.clone());
}
