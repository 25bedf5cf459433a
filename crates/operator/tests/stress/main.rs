//! The operator as a process of its own under load: many objects, and everything that can break breaking.
//!
//! By default both run small, for CI. `K8E_SCALE=full` and `K8E_CHAOS_SECONDS=60` give the figures of
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
