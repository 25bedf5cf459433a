//! The guest as the host sees it: a real listener, real processes, real files. Runs as root.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test stops where it is surprised"
)]

#[path = "guest/exec.rs"]
mod exec;
#[path = "guest/files.rs"]
mod files;
#[path = "guest/forward.rs"]
mod forward;
#[path = "guest/init.rs"]
mod init;
#[path = "guest/runs.rs"]
mod runs;
#[path = "guest/support.rs"]
mod support;
#[path = "guest/terminals.rs"]
mod terminals;
