//! Whether a connection that is open may stay when the policy changes.

use super::{Denial, Ground, Pass, by_address, by_name, denies_names, has_address, not_denied};
use crate::dns;
use crate::ward::{Policy, Ward};
use k8e_model::egress::{DenyReason, HostName};
use std::net::SocketAddrV4;

/// Whether what was passed may go on under another policy. An address that was the name's when the
/// connection was made is not asked for again: names move, connections do not.
pub(in crate::tcp) async fn still(
    ward: &Ward,
    policy: &Policy,
    to: SocketAddrV4,
    pass: &Pass,
) -> Result<(), Denial> {
    let allowed = match by_address(policy, to, |address| ward.is_this_machine(address)) {
        Err(denial) => Err(denial),
        Ok(ground) => match &pass.name {
            Some(name) => still_named(ward, policy, to, ground, name, pass.checked).await,
            None => still_nameless(policy, &ground, &pass.told),
        },
    };
    allowed.map_err(|denial| Denial {
        reason: DenyReason::PolicyChanged,
        name: pass.name.clone().or(denial.name),
        rule: denial.rule,
    })
}

async fn still_named(
    ward: &Ward,
    policy: &Policy,
    to: SocketAddrV4,
    ground: Ground,
    name: &HostName,
    checked: bool,
) -> Result<(), Denial> {
    match ground {
        Ground::Open { .. } => not_denied(policy, name)?,
        Ground::ByName => {
            by_name(policy, name, to.port())?;
            if !checked {
                has_address(ward, name, *to.ip()).await?;
            }
        }
    }
    if !denies_names(&policy.deny) {
        return Ok(());
    }
    // An alias on the way may be what is denied now, and only a lookup knows those.
    match dns::look_up(ward, name).await {
        Err(denied) if denied.reason == DenyReason::DenyList => Err(Denial {
            rule: denied.rule,
            ..Denial::by(denied.reason)
        }),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Nobody looked for a name, so it counts as every name that the sandbox was told is there.
fn still_nameless(policy: &Policy, ground: &Ground, told: &[HostName]) -> Result<(), Denial> {
    if *ground == Ground::ByName {
        return Err(Denial::by(DenyReason::NotAllowed));
    }
    told.iter().try_for_each(|name| not_denied(policy, name))
}

#[cfg(test)]
mod tests;
