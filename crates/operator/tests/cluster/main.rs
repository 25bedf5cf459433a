//! The operator on a real control plane with simulated nodes: etcd, kube-apiserver, the scheduler, the garbage
//! collector and KWOK. One cluster and one operator serve all tests; each test has a namespace of its own.

mod claims;
mod kinds;
mod kubectl;
mod lifecycle;
mod networks;
mod pools;
mod rig;
mod sandboxes;
mod schema;
mod suspension;
