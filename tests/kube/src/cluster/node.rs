//! A real node: containerd and a kubelet on this machine.

use super::Site;
use crate::Error;
use crate::service::Service;
use std::path::Path;

/// The networks of one cluster with a real node.
#[derive(Debug)]
pub(super) struct Network {
    number: u8,
}

pub(super) fn start(_: &Site, _: &Network, _: &mut Vec<Service>) -> Result<(), Error> {
    Err(Error::NotFit("code that is not written yet".to_owned()))
}

// === impl Network ===

impl Network {
    pub(super) fn make(_: &Path) -> Result<Self, Error> {
        Ok(Self { number: 1 })
    }

    /// The first address of the services' network: Kubernetes' own.
    pub(super) fn apiserver_address(&self) -> String {
        format!("10.214.{}.1", self.number)
    }

    /// The network of services.
    pub(super) fn services(&self) -> String {
        format!("10.214.{}.0/24", self.number)
    }
}
