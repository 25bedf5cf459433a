//! Saved workspaces: a tree of files as content-defined chunks, deduplicated within one owner, and a portable archive
//! of it.
//!
//! | | |
//! |---|---|
//! | chunk | 32 to 512 KiB of a file (FastCDC), named by its BLAKE3 hash, compressed with zstd |
//! | pack | a file with some hundred chunks and their index at its end; written once, never changed |
//! | manifest | the entries of a tree in the order of a walk; a stream of messages, itself cut into (small) chunks |
//! | root | names the chunks of a manifest; a file of its own, and what a snapshot's row in the database names |
//!
//! Nothing here is asynchronous, knows a session, or trusts its input: entries come from hostile guests, archives from
//! clients, and both are data with bounds.

mod archive;
mod chunker;
mod entry;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod manifest;
mod pack;
mod restore;
mod save;
mod store;
#[cfg(test)]
mod tests;

pub use archive::{ArchiveInfo, KEY_BYTES, export, import};
pub use chunker::{CHUNK_BYTES_MAX, ChunkRef, Hash};
pub use entry::{Entry, Extent, Kind, PATH_BYTES_MAX, Xattr};
pub use error::SnapshotError;
pub use manifest::{ENTRIES_MAX, ROOT_BYTES_MAX, Root, digest, read_manifest};
pub use restore::{Piece, Step, restore};
pub use save::{Known, Meta, Pass};
pub use store::{Collected, Owner, Quota};
