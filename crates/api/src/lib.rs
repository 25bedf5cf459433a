//! The public gRPC API: the generated stubs, the conversions to the model, and the Rust client.
//!
//! Nobody else turns wire messages into model types or model codes into gRPC codes, so a rule
//! about the wire has one home. Builds on every platform that the command line builds on.

pub mod client;
pub mod convert;
pub mod sandbox_v1;
pub mod status;
pub mod v1;

/// Bytes of one message that a server takes: the largest code, with room for its environment.
pub const REQUEST_BYTES_MAX: usize = 20 * 1024 * 1024;

/// Bytes of one message that a client takes: a long list of sessions is one message.
pub const RESPONSE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Metadata with which a client says for which session it works: it cannot approve what that session asked for.
pub const SESSION_HEADER: &str = "x-k8e-session";

/// Bytes of standard input or file content that a client puts into one message.
pub const CHUNK_BYTES: usize = 128 * 1024;
