//! Tenant authorization: which tenant a session is for, and whether its maker may use it.
//!
//! Every session that is made or looked for by its tenant gets it from here, whichever API was
//! called; a session that exists is used by its owner, whatever its tenant.

use crate::Error;
use k8e_model::{Principal, TenantId};

/// The tenant that a request is about: the caller's default where it names none.
pub(crate) fn tenant_of<'a>(
    who: &'a Principal,
    asked: Option<&'a TenantId>,
) -> Result<&'a TenantId, Error> {
    let tenants = who.tenants();
    match asked {
        None => Ok(tenants.default_tenant()),
        Some(asked) if tenants.allows(asked) => Ok(asked),
        Some(asked) => Err(Error::TenantDenied {
            tenant: asked.clone(),
            allowed: tenants.entries().join(", "),
        }),
    }
}
