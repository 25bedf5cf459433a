//! Kubernetes: the agent-sandbox CRDs, their controllers and the router. kube-rs is named only here.

pub mod assign;
pub mod cache;
mod claim;
pub mod crd;
mod error;
mod events;
mod gathering;
mod held;
mod leader;
mod metrics;
mod operator;
pub mod options;
mod pool;
mod queue;
pub mod router;
mod sandbox;
mod side_door;
mod template;
mod timing;
pub mod units;
mod world;

pub use error::Error;
pub use operator::{run, run_with};
