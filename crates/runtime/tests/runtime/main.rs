//! Integration tests of the built binary over real sockets: raw HTTP, a gRPC client, and the Python client of
//! agent-sandbox.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bounds;
mod frozen;
mod legacy;
mod process;
mod rest;
mod sdk;
mod stop;
mod support;
