//! What may be told of a name: whether it may be asked for, and which of its addresses may be used.
//!
//! The rules are here, as functions of a policy and an answer; [`look_up`] asks in between.

use super::resolver::{ResolveError, Resolved};
use crate::ward::{Policy, Ward};
use hickory_proto::op::ResponseCode;
use k8e_model::egress::{DenyReason, EgressPolicy, HostName, is_never, is_public};
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::time::timeout;

/// How long a sandbox that has all its lookups under way waits for one to end. Each ends in time.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// What a sandbox may be told of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The aliases after the asked name; none is denied.
    pub(crate) chain: Vec<HostName>,
    /// At least one, and each may be connected to.
    pub(crate) addresses: Vec<Ipv4Addr>,
    /// How long that holds.
    pub(crate) ttl: Duration,
}

/// Why a sandbox is told nothing of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    pub(crate) reason: DenyReason,
    /// The entry of a deny list.
    pub(crate) rule: Option<String>,
    /// The address because of which, or the first of them.
    pub(crate) address: Option<Ipv4Addr>,
    /// What a DNS client is told.
    pub(super) code: ResponseCode,
}

/// Looks a name up and takes out what may not be told. Shared by DNS and by the check of
/// connections, so that both say the same.
///
/// The policy is asked before, so that nothing is sent for a name that is not allowed, and again
/// after: it may have changed while an upstream took its time.
pub(crate) async fn look_up(ward: &Ward, name: &HostName) -> Result<Found, Denied> {
    may_ask(&ward.policy(), name)?;
    let resolved = match ward.resolver().known(name) {
        Some(known) => known,
        None => ask(ward, name).await?,
    };
    let policy = ward.policy();
    may_ask(&policy, name)?;
    may_tell(&policy, resolved?, |address| ward.is_this_machine(address))
}

/// Asks upstreams, as often and as many at once as this sandbox may.
async fn ask(ward: &Ward, name: &HostName) -> Result<Result<Resolved, ResolveError>, Denied> {
    if !ward.questions().may_look_up() {
        return Err(Denied {
            code: ResponseCode::ServFail,
            ..Denied::by(DenyReason::RateLimited, None)
        });
    }
    let turn = timeout(TURN_TIMEOUT, ward.questions().lookups().acquire()).await;
    let Ok(Ok(_turn)) = turn else {
        return Err(ResolveError::Failed.into());
    };
    Ok(ward.resolver().resolve(name).await)
}

/// Whether some rule allows the name, and nobody denies it.
pub(super) fn may_ask(policy: &Policy, name: &HostName) -> Result<(), Denied> {
    if let Some(entry) = policy.deny.denies_name(name) {
        return Err(Denied::by(DenyReason::DenyList, Some(entry)));
    }
    // `all` is about the internet. What has only one part is a name of the server's own network.
    let at_home = policy.allow == EgressPolicy::All && is_local(name);
    if at_home || !policy.allow.allows_name(name) {
        return Err(Denied::by(DenyReason::NotAllowed, None));
    }
    Ok(())
}

/// Takes out the addresses that may not be used. An alias that is denied denies all of it.
fn may_tell(
    policy: &Policy,
    resolved: Resolved,
    is_this_machine: impl Fn(Ipv4Addr) -> bool,
) -> Result<Found, Denied> {
    for name in &resolved.names {
        if let Some(entry) = policy.deny.denies_name(name) {
            return Err(Denied::by(DenyReason::DenyList, Some(entry)));
        }
    }
    let mut first_out = None;
    let mut addresses = resolved.addresses;
    addresses.retain(|address| {
        let out = may_use(policy, *address, &is_this_machine).err();
        let stays = out.is_none();
        first_out = first_out.take().or(out);
        stays
    });
    match (addresses.is_empty(), first_out) {
        (false, _) => Ok(Found {
            chain: resolved.names,
            addresses,
            ttl: resolved.ttl,
        }),
        (true, Some(denied)) => Err(denied),
        (true, None) => Err(ResolveError::NoAddress.into()),
    }
}

fn may_use(
    policy: &Policy,
    address: Ipv4Addr,
    is_this_machine: impl Fn(Ipv4Addr) -> bool,
) -> Result<(), Denied> {
    let (reason, rule) = if is_never(address) {
        (DenyReason::ThisMachine, None)
    } else if let Some(entry) = policy.deny.denies_address(address) {
        (DenyReason::DenyList, Some(entry))
    } else if !is_public(address) && !policy.allow.covers_address(address) {
        (DenyReason::PrivateAddress, None)
    } else if is_this_machine(address) {
        (DenyReason::ThisMachine, None)
    } else {
        return Ok(());
    };
    Err(Denied {
        address: Some(address),
        ..Denied::by(reason, rule)
    })
}

/// A name without a dot, or below `localhost` (RFC 6761).
fn is_local(name: &HostName) -> bool {
    let name = name.as_str();
    !name.contains('.') || name.ends_with(".localhost")
}

// === impl Denied ===

impl Denied {
    pub(super) fn by(reason: DenyReason, rule: Option<String>) -> Self {
        Self {
            reason,
            rule,
            address: None,
            code: ResponseCode::Refused,
        }
    }
}

impl From<ResolveError> for Denied {
    fn from(error: ResolveError) -> Self {
        let code = match error {
            ResolveError::NoName => ResponseCode::NXDomain,
            ResolveError::NoAddress => ResponseCode::NoError,
            ResolveError::LeadsNowhere | ResolveError::Failed => ResponseCode::ServFail,
        };
        Self {
            code,
            ..Self::by(DenyReason::Unresolved, None)
        }
    }
}

#[cfg(test)]
mod tests;
