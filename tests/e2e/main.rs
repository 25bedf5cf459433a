//! End-to-end tests: the built binary, real sandboxes, as root.
#![expect(clippy::unwrap_used, reason = "all of it is tests, helpers too")]

mod allowed_hosts;
mod approvals;
mod background;
mod bad_input;
mod bench;
mod check_config;
mod cli;
mod contract;
mod crash;
mod crowd;
mod e2b;
mod egress;
mod escape;
mod examples;
mod expose;
mod flood;
mod fork;
mod gvisor;
mod identity;
mod internet_answers;
mod memory_bombs;
mod messages;
mod metrics;
mod pause;
mod pool;
mod run_session;
mod saved;
mod secrets;
mod skill;
mod snapshots;
mod sub_agents;
mod takeover;
mod templates;
mod terminals;
