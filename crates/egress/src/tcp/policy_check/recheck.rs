//! Check of an open connection after a policy change.

use super::{
    AddressVerdict, Denial, Grant, by_address, by_name, denies_names, has_address, not_denied,
};
use crate::dns;
use crate::sandbox_net::{Policy, SandboxNet};
use k8e_model::egress::{DenyReason, HostName};
use std::net::SocketAddrV4;

/// Checks whether the new policy still allows the connection. An address that was verified when the
/// connection was made is not looked up again: DNS changes, open connections do not.
pub(in crate::tcp) async fn recheck(
    sandbox: &SandboxNet,
    policy: &Policy,
    to: SocketAddrV4,
    grant: &Grant,
) -> Result<(), Denial> {
    let allowed = match by_address(policy, to, |address| sandbox.is_host_address(address)) {
        Err(denial) => Err(denial),
        Ok(address_verdict) => match &grant.name {
            Some(name) => {
                recheck_named(
                    sandbox,
                    policy,
                    to,
                    address_verdict,
                    name,
                    grant.address_verified,
                )
                .await
            }
            None => recheck_nameless(policy, &address_verdict, &grant.dns_names),
        },
    };
    allowed.map_err(|denial| Denial {
        reason: DenyReason::PolicyChanged,
        name: grant.name.clone().or(denial.name),
        rule: denial.rule,
    })
}

async fn recheck_named(
    sandbox: &SandboxNet,
    policy: &Policy,
    to: SocketAddrV4,
    address_verdict: AddressVerdict,
    name: &HostName,
    address_verified: bool,
) -> Result<(), Denial> {
    match address_verdict {
        AddressVerdict::Allowed { .. } => not_denied(policy, name)?,
        AddressVerdict::NeedsName => {
            by_name(policy, name, to.port())?;
            if !address_verified {
                has_address(sandbox, name, *to.ip()).await?;
            }
        }
    }
    if !denies_names(&policy.deny) {
        return Ok(());
    }
    // A CNAME may be denied now, and only a lookup returns those.
    match dns::lookup(sandbox, name).await {
        Err(denied) if denied.reason == DenyReason::DenyList => Err(Denial {
            rule: denied.rule,
            ..Denial::by(denied.reason)
        }),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// No name was requested, so every name for which DNS returned the address counts.
fn recheck_nameless(
    policy: &Policy,
    address_verdict: &AddressVerdict,
    dns_names: &[HostName],
) -> Result<(), Denial> {
    if *address_verdict == AddressVerdict::NeedsName {
        return Err(Denial::by(DenyReason::NotAllowed));
    }
    dns_names
        .iter()
        .try_for_each(|name| not_denied(policy, name))
}

#[cfg(test)]
mod tests;
