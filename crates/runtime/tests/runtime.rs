//! The built program over real sockets: raw HTTP, a gRPC client, and agent-sandbox's own.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "runtime/bounds.rs"]
mod bounds;
#[path = "runtime/legacy.rs"]
mod legacy;
#[path = "runtime/process.rs"]
mod process;
#[path = "runtime/rest.rs"]
mod rest;
#[path = "runtime/sdk.rs"]
mod sdk;
#[path = "runtime/stop.rs"]
mod stop;
#[path = "runtime/support.rs"]
mod support;
