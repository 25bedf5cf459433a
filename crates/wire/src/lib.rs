//! Wire protocol between host and guest: protobuf messages, length-prefixed framing, and a typed
//! connection for each end.
//!
//! One connection carries one call. The host sends a [`Request`](proto::Request) first; closing the
//! connection cancels the call. The host does not trust the guest: its frames are at most
//! [`GUEST_FRAME_BYTES_MAX`], and are decoded before they are used.

mod connection;
mod frame;
pub mod proto;
mod rate_limit;

pub use connection::{GuestEnd, HostEnd, Inputs, Replies, ReplySink, Requests};
pub use frame::{FrameReader, FrameWriter, WireError};
pub use rate_limit::RateLimit;

/// Protocol version, exchanged in `Hello`; a guest with another version is not used.
pub const PROTOCOL: u32 = 1;

/// Largest frame that the host accepts from a guest, in bytes: a chunk and its envelope, with room.
pub const GUEST_FRAME_BYTES_MAX: usize = 512 * 1024;

/// Largest frame that the guest accepts, in bytes: the largest code of a run and its environment.
pub const HOST_FRAME_BYTES_MAX: usize = 18 * 1024 * 1024;

/// Largest chunk of output or file content in one frame, in bytes.
pub const CHUNK_BYTES: usize = 128 * 1024;
