//! The protocol between the host and the guest: messages, framing, and a connection for each end.
//!
//! One connection carries one call. The host speaks first with a [`Request`](proto::Request);
//! closing the connection cancels. The host never believes the guest: a frame of the guest's is
//! at most [`GUEST_FRAME_BYTES_MAX`], and what it holds is decoded before it is used.

mod connection;
mod frame;
pub mod proto;

pub use connection::{GuestEnd, HostEnd, Inputs, Replies, ReplySink, Requests};
pub use frame::{FrameReader, FrameWriter, WireError};

/// What both ends say in `Hello`; a guest with another number is not used.
pub const PROTOCOL: u32 = 1;

/// Largest frame that the host takes from a guest: a chunk and its envelope, with room.
pub const GUEST_FRAME_BYTES_MAX: usize = 512 * 1024;

/// Largest frame that the guest takes: the largest code of a run, with room for its environment.
pub const HOST_FRAME_BYTES_MAX: usize = 18 * 1024 * 1024;

/// Bytes of output or file content that one frame carries.
pub const CHUNK_BYTES: usize = 128 * 1024;
