//! OCI images: references, manifests, registries, archives, and the unpacking of layers.
//!
//! Everything here reads what somebody else wrote. Nothing here needs root or knows of sandboxes:
//! the server fetches with it, the command line reads archives with it, and the launcher unpacks layers
//! with it in a process that has been confined for that.

mod archive;
mod decode;
#[cfg(unix)]
mod directory;
mod error;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub mod fuzzing;
mod hash;
mod manifest;
mod reference;
mod registry;
mod tar;
#[cfg(target_os = "linux")]
mod unpack;

pub use archive::{LocalImage, Source};
pub use decode::Compression;
pub use error::ImageError;
pub use hash::{Hasher, digest_of};
pub use manifest::{
    Blob, CONFIG_BYTES_MAX, IMAGE_COMPRESSED_BYTES_MAX, LAYER_COMPRESSED_BYTES_MAX, LayerBlob,
    MANIFEST_BYTES_MAX, Manifest,
};
pub use reference::Reference;
pub use registry::{BlobStream, Credentials, Registry, RegistryPolicy, Resolve};
#[cfg(target_os = "linux")]
pub use unpack::{LAYER_BYTES_MAX, LAYER_ENTRIES_MAX, LayerLimits, Unpacked, is_opaque, unpack};
