//! Generated from `proto/sandbox/v1`; do not edit, run `cargo xtask codegen`.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::wildcard_enum_match_arm,
    clippy::large_futures,
    reason = "generated"
)]

include!("gen/sandbox.v1.rs");

/// The service's own description, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("gen/sandbox.v1.bin");
