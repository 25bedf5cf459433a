//! DNS policy: whether a name may be resolved, and which of its addresses may be returned.
//!
//! The rules are pure functions of a policy and a resolution; [`lookup`] calls the resolver in between.

use super::resolver::{ResolveError, Resolved};
use crate::sandbox_net::{Policy, SandboxNet};
use hickory_proto::op::ResponseCode;
use k8e_model::egress::{DenyReason, EgressPolicy, HostName, is_never, is_public};
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::time::timeout;

/// How long a sandbox with the maximum of concurrent lookups waits for one to end.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// The addresses of a name that the policy allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The CNAME chain after the queried name; none of it is denied.
    pub(crate) chain: Vec<HostName>,
    /// Allowed addresses, at least one.
    pub(crate) addresses: Vec<Ipv4Addr>,
    /// Remaining time to live.
    pub(crate) ttl: Duration,
}

/// Why a name is not resolved for a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    pub(crate) reason: DenyReason,
    /// The deny list entry that matched.
    pub(crate) rule: Option<String>,
    /// The first address that was denied.
    pub(crate) address: Option<Ipv4Addr>,
    /// Response code of the DNS reply.
    pub(super) code: ResponseCode,
}

/// Resolves a name and removes the addresses that the policy denies. Used by the DNS server and by
/// the policy check of connections, so that both decide the same.
///
/// The policy is checked before, so that no upstream is queried for a name that is not allowed, and
/// again after, because it may have changed meanwhile.
pub(crate) async fn lookup(sandbox: &SandboxNet, name: &HostName) -> Result<Found, Denied> {
    may_resolve(&sandbox.policy(), name)?;
    let resolved = match sandbox.resolver().known(name) {
        Some(known) => known,
        None => resolve(sandbox, name).await?,
    };
    let policy = sandbox.policy();
    may_resolve(&policy, name)?;
    filter_resolved(&policy, resolved?, |address| {
        sandbox.is_host_address(address)
    })
}

/// Queries upstreams, within the rate and concurrency limits of this sandbox.
async fn resolve(
    sandbox: &SandboxNet,
    name: &HostName,
) -> Result<Result<Resolved, ResolveError>, Denied> {
    if !sandbox.query_limits().may_look_up() {
        return Err(Denied {
            code: ResponseCode::ServFail,
            ..Denied::by(DenyReason::RateLimited, None)
        });
    }
    let turn = timeout(TURN_TIMEOUT, sandbox.query_limits().lookups().acquire()).await;
    let Ok(Ok(_turn)) = turn else {
        return Err(ResolveError::Failed.into());
    };
    Ok(sandbox.resolver().resolve(name).await)
}

/// Checks that a rule allows the name and no deny list entry matches it.
pub(super) fn may_resolve(policy: &Policy, name: &HostName) -> Result<(), Denied> {
    if let Some(entry) = policy.deny.denies_name(name) {
        return Err(Denied::by(DenyReason::DenyList, Some(entry)));
    }
    // `all` means the internet. A name without a dot belongs to the server's own network.
    let at_home = policy.allow == EgressPolicy::All && is_local(name);
    if at_home || !policy.allow.allows_name(name) {
        return Err(Denied::by(DenyReason::NotAllowed, None));
    }
    Ok(())
}

/// Removes the addresses that are denied. A denied CNAME denies the whole resolution.
fn filter_resolved(
    policy: &Policy,
    resolved: Resolved,
    is_host_address: impl Fn(Ipv4Addr) -> bool,
) -> Result<Found, Denied> {
    for name in &resolved.names {
        if let Some(entry) = policy.deny.denies_name(name) {
            return Err(Denied::by(DenyReason::DenyList, Some(entry)));
        }
    }
    let mut first_out = None;
    let mut addresses = resolved.addresses;
    addresses.retain(|address| {
        let out = may_return(policy, *address, &is_host_address).err();
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

fn may_return(
    policy: &Policy,
    address: Ipv4Addr,
    is_host_address: impl Fn(Ipv4Addr) -> bool,
) -> Result<(), Denied> {
    let (reason, rule) = if is_never(address) {
        (DenyReason::ThisMachine, None)
    } else if let Some(entry) = policy.deny.denies_address(address) {
        (DenyReason::DenyList, Some(entry))
    } else if !is_public(address) && !policy.allow.covers_address(address) {
        (DenyReason::PrivateAddress, None)
    } else if is_host_address(address) {
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
            ResolveError::BadAliasChain | ResolveError::Failed => ResponseCode::ServFail,
        };
        Self {
            code,
            ..Self::by(DenyReason::Unresolved, None)
        }
    }
}

#[cfg(test)]
mod tests;
