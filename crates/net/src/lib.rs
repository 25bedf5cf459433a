//! Server plumbing that several crates share; a leaf crate, which uses no other of ours.
//!
//! Each module is one standard piece: the bounded accept loop, the token bucket, hop-by-hop headers, forms, `grpc-timeout`,
//! Go's durations, short paths of Unix sockets, the signals that stop a server, and (feature `admin-http`) the HTTP server
//! for metrics and probes. What only one crate needs stays in that crate.

pub mod accept;
#[cfg(feature = "admin-http")]
pub mod admin_http;
pub mod go_duration;
pub mod grpc_timeout;
pub mod hop_by_hop;
pub mod multipart;
pub mod proc_fd;
pub mod shutdown;
pub mod token_bucket;
