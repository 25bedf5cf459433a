//! The only way out of a sandbox, as far as a session has to do with it.

use crate::Error;
use k8e_driver::Sandbox;
use k8e_egress::{Egress, Gate};
use k8e_model::{DenyList, TenantId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What no session may reach, whatever it asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Denied {
    /// To everybody.
    pub everybody: DenyList,
    /// To the sessions of these tenants, besides.
    pub tenants: BTreeMap<TenantId, DenyList>,
}

/// Listens in the network of a sandbox, letting nothing through. None when nothing leaves it at
/// all: then there is nothing to guard.
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
    /// All that is denied to the sessions of a tenant.
    pub fn to(&self, tenant: &TenantId) -> DenyList {
        match self.tenants.get(tenant) {
            Some(more) => self.everybody.merged(more),
            None => self.everybody.clone(),
        }
    }
}
