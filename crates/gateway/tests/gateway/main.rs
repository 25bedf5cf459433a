//! The doors for real: a socket, TLS, the engine, and a driver without isolation.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admin;
mod approvals;
mod background;
mod bounds;
mod compat;
mod connection_limits;
mod doors;
mod egress;
mod expose;
mod guesses;
mod identity;
mod login;
mod loopback;
mod runs;
mod secrets;
mod server;
mod snapshots;
mod tenants;
mod terminals;
