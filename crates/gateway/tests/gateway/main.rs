//! The gateway for real: a Unix socket, TLS, the engine, and a driver without isolation.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admin;
mod approvals;
mod background;
mod bounds;
mod connection_limits;
mod egress;
mod expose;
mod identity;
mod listeners;
mod login;
mod loopback;
mod runs;
mod sandbox_v1;
mod secrets;
mod server;
mod snapshots;
mod tenants;
mod terminals;
mod throttle;
