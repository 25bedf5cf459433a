//! Snapshots: names and layers.

use k8e_model::{Error, SnapshotLayers, SnapshotName};

/// The snapshot that a call names.
pub fn snapshot_name(text: &str) -> Result<SnapshotName, Error> {
    text.parse()
}

/// The layers of a snapshot.
pub fn snapshot_layers(layers: Vec<String>) -> Result<SnapshotLayers, Error> {
    layers.try_into()
}
