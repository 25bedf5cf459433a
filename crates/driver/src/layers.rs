//! The store of unpacked image layers: content-addressed, shared by all sandboxes of a machine.

use crate::DriverError;
use async_trait::async_trait;
use k8e_image::Compression;
use k8e_model::Digest;
use serde::{Deserialize, Serialize};
use std::fs::File;

/// A layer that is to be unpacked.
#[derive(Debug)]
pub struct LayerBlob {
    /// Its bytes, as they were fetched, from the front.
    pub file: File,
    /// How they are compressed.
    pub compression: Compression,
    /// The SHA-256 of what they are when uncompressed.
    pub diff_id: Digest,
    /// Uncompressed, it may have no more bytes than this.
    pub bytes_max: u64,
}

/// What a layer takes on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSize {
    /// Of all its files.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

/// Layers on this machine, by DiffID. One is there whole or not at all.
#[async_trait]
pub trait LayerStore: Send + Sync {
    /// Unpacks a layer, unless it is there. On failure nothing is left.
    async fn unpack(&self, blob: LayerBlob) -> Result<LayerSize, DriverError>;

    /// What a layer takes; none when it is not there.
    async fn find(&self, diff_id: &Digest) -> Result<Option<LayerSize>, DriverError>;

    /// All layers.
    async fn list(&self) -> Result<Vec<Digest>, DriverError>;

    /// Removes a layer that no sandbox uses. What is not there is no error.
    async fn remove(&self, diff_id: &Digest) -> Result<(), DriverError>;
}
