//! Integration tests of the operator on a real control plane (etcd, kube-apiserver, kube-controller-manager, scheduler)
//! with nodes simulated by KWOK. All tests share one cluster and one operator; each has a namespace of its own.

mod claims;
mod kinds;
mod kubectl;
mod leadership;
mod lifecycle;
mod networks;
mod pools;
mod rig;
mod sandboxes;
mod schema;
mod suspension;
