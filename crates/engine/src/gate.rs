//! Egress gate of a session: attachment to the sandbox's network, and the operator's deny lists.

use crate::Error;
use k8e_driver::Sandbox;
use k8e_egress::{Egress, Gate};
use k8e_model::{DenyList, TenantId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Egress deny lists, which override every session's policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Denied {
    /// For all sessions.
    pub everybody: DenyList,
    /// Additional deny lists by tenant.
    pub tenants: BTreeMap<TenantId, DenyList>,
}

/// Attaches an egress gate to a sandbox, with default deny. None when the server has no egress proxy
/// or the sandbox no network.
pub(crate) async fn attach(
    gates: Option<&Arc<Egress>>,
    sandbox: &dyn Sandbox,
) -> Result<Option<Arc<Gate>>, Error> {
    let Some(gates) = gates else {
        return Ok(None);
    };
    let Some(sockets) = sandbox.network().await.map_err(Error::Launch)? else {
        return Ok(None);
    };
    let gate = gates.attach(sockets).map_err(Error::Network)?;
    Ok(Some(Arc::new(gate)))
}

// === impl Denied ===

impl Denied {
    /// The deny list of a tenant's sessions.
    pub fn to(&self, tenant: &TenantId) -> DenyList {
        match self.tenants.get(tenant) {
            Some(more) => self.everybody.merged(more),
            None => self.everybody.clone(),
        }
    }
}
