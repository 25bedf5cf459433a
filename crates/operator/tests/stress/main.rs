//! The operator as a separate process under load: many objects (scale), and fault injection (chaos).
//!
//! By default both are small, for CI. `K8E_SCALE=full` and `K8E_CHAOS_SECONDS=60` give the figures of
//! docs/benchmarks.md; run them with `--nocapture`.

#![allow(clippy::print_stdout, reason = "figures for a person")]

mod chaos;
mod child;
mod faults;
#[path = "../cluster/kinds.rs"]
mod kinds;
mod load;
mod scale;
mod stubborn;
