//! Kubernetes: the agent-sandbox CRDs, their controllers and the router. kube-rs is named only here.

pub mod crd;
pub mod router;
