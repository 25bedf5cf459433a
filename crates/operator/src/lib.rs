//! Kubernetes operator and router: the custom resource definitions (CRDs) of agent-sandbox, the controllers that
//! reconcile them, and the reverse proxy in front of sandboxes. The only crate that depends on kube-rs.

pub mod assign;
pub mod cache;
mod caches;
mod claim;
mod context;
pub mod crd;
mod debounce;
mod edge_detector;
mod error;
mod events;
mod leader_election;
mod metrics;
mod object_meta;
mod operator;
pub mod options;
mod pool;
pub mod router;
mod sandbox;
mod template;
mod timing;
pub mod units;
mod work_queue;

pub use error::Error;
pub use operator::{run, run_with};
