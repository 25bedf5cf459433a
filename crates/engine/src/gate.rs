//! The only way out of a sandbox, as far as a session has to do with it.

use crate::Error;
use k8e_driver::Sandbox;
use k8e_egress::{Egress, Gate};
use std::sync::Arc;

/// Listens in the network of a sandbox, letting nothing through. None when nothing leaves it at
/// all: then there is nothing to guard.
pub(crate) async fn attach(
    gates: Option<&Arc<Egress>>,
    sandbox: &dyn Sandbox,
) -> Result<Option<Arc<Gate>>, Error> {
    let Some(gates) = gates else {
        return Ok(None);
    };
    let Some(namespace) = sandbox.network().map_err(Error::Launch)? else {
        return Ok(None);
    };
    let gate = gates.attach(namespace).await.map_err(Error::Network)?;
    Ok(Some(Arc::new(gate)))
}
