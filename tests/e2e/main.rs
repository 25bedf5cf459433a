//! End-to-end tests: the built binary, real sandboxes, as root.
#![expect(clippy::unwrap_used, reason = "all of it is tests, helpers too")]

mod allowed_hosts;
mod background;
mod bad_input;
mod bench;
mod check_config;
mod cli;
mod contract;
mod crash;
mod egress;
mod escape;
mod flood;
mod gvisor;
mod identity;
mod internet_answers;
mod metrics;
mod pool;
mod secrets;
mod terminals;
