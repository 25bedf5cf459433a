//! The guest agent from the host's side: a real listener, real processes, real files. Runs as root.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test stops where it is surprised"
)]

mod exec;
mod files;
mod forward;
mod init;
mod runs;
mod support;
mod terminals;
mod watch;
