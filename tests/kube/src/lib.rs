//! A real Kubernetes of plain processes: what the tests of the operator run against, and what
//! `cargo xtask kube` starts for a person.
//!
//! [`Cluster::up`] makes certificates, starts etcd, the control plane and, by [`Profile`], simulated
//! nodes (KWOK) or a kubelet with containerd, and waits until they answer. Everything a cluster
//! has is in one directory and in processes that carry that directory's name in their environment,
//! so that it can be removed whole, also by somebody who did not start it.
//!
//! Blocking, without async: it starts programs and waits for them.

mod binaries;
mod certificates;
mod cluster;
mod error;
mod image;
mod keeper;
mod ports;
mod service;
mod sys;

pub use binaries::{Need, directory as binaries_directory};
pub use cluster::{Cluster, Options, Profile, default_dir, down};
pub use error::Error;
pub use image::Image;

/// Tells a person what takes time. Output of a test that fails, or of `cargo xtask kube`.
#[expect(
    clippy::print_stderr,
    reason = "a development tool talks to its terminal"
)]
fn say(message: &str) {
    eprintln!("kube: {message}");
}
