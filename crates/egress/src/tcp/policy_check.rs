//! Policy check of a connection: by the policy, the destination address, and the requested name.
//!
//! The order makes it safe. Deny lists and addresses of the host come first, whatever any rule allows;
//! then rules about networks (CIDR); only then names, which the client chooses, and which therefore
//! count only together with an address that DNS returned for the name.

mod recheck;

pub(super) use recheck::recheck;

use crate::dns;
use crate::sandbox_net::{Policy, SandboxNet};
use k8e_model::egress::{
    DenyList, DenyReason, EgressPolicy, HostName, HostPattern, Ipv4Net, Target, is_never, is_public,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

/// Names of `host:port` rules that are looked up for one connection when no sent reply matches. Each
/// may cost an upstream query, and a sandbox can have any number of rules.
const LOOKUPS_MAX: usize = 8;

/// Verdict of the check by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AddressVerdict {
    /// Allowed, unless the client requests a name that is denied.
    Allowed {
        /// The rule that allows it.
        rule: String,
    },
    /// Only a name can allow it.
    NeedsName,
}

/// The name that a client requests (SNI or `Host`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestedName {
    Name(HostName),
    /// No name, or an address.
    Missing,
    /// Encrypted ClientHello: an outer name or none, and perhaps another that only the server can read.
    Encrypted(Option<HostName>),
}

/// Why a connection is allowed; checked again when the policy changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    /// The requested name.
    pub(super) name: Option<HostName>,
    /// The rule that allows it.
    pub(super) rule: String,
    /// Whether DNS returned this address for the name. Not checked where a CIDR rule allows it.
    pub(super) address_verified: bool,
    /// Without a requested name: all names for which DNS returned this address to the sandbox.
    pub(super) dns_names: Vec<HostName>,
}

/// Why a connection is denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denial {
    pub(super) reason: DenyReason,
    /// The requested name.
    pub(super) name: Option<HostName>,
    /// The deny list entry that matched.
    pub(super) rule: Option<String>,
}

/// Check by address, before a byte is read.
pub(super) fn by_address(
    policy: &Policy,
    to: SocketAddrV4,
    is_host_address: impl Fn(Ipv4Addr) -> bool,
) -> Result<AddressVerdict, Denial> {
    let (address, port) = (*to.ip(), to.port());
    if let Some(entry) = policy.deny.denies_address(address) {
        return Err(Denial::by(DenyReason::DenyList).rule(entry));
    }
    if is_never(address) || is_host_address(address) {
        return Err(Denial::by(DenyReason::ThisMachine));
    }
    if let Some(rule) = policy.allow.rule_for_address(address, port) {
        let rule = rule.to_string();
        return Ok(AddressVerdict::Allowed { rule });
    }
    if !is_public(address) {
        return Err(Denial::by(DenyReason::PrivateAddress));
    }
    match policy.allow {
        EgressPolicy::None => Err(Denial::by(DenyReason::NotAllowed)),
        EgressPolicy::Only(_) => Ok(AddressVerdict::NeedsName),
        EgressPolicy::All => {
            let rule = "all".to_owned();
            Ok(AddressVerdict::Allowed { rule })
        }
    }
}

/// Check by name: returns the rule that allows it on this port.
pub(super) fn by_name(policy: &Policy, name: &HostName, port: u16) -> Result<String, Denial> {
    not_denied(policy, name)?;
    let denied = |reason| Denial::by(reason).name(name);
    match policy.allow.rule_for_name(name, port) {
        Some(rule) => Ok(rule.to_string()),
        None if policy.allow.allows_name(name) => Err(denied(DenyReason::PortClosed)),
        None => Err(denied(DenyReason::NotAllowed)),
    }
}

/// Check of protocols in which the client sends a name: TLS and HTTP.
pub(super) async fn by_requested_name(
    sandbox: &SandboxNet,
    policy: &Policy,
    to: SocketAddrV4,
    requested: &RequestedName,
) -> Result<Grant, Denial> {
    match by_address(policy, to, |address| sandbox.is_host_address(address))? {
        AddressVerdict::Allowed { rule } => open(sandbox, policy, to, rule, requested),
        AddressVerdict::NeedsName => {
            let name = match requested {
                RequestedName::Name(name) => name,
                RequestedName::Missing => return Err(Denial::by(DenyReason::NoName)),
                RequestedName::Encrypted(name) => return Err(Denial::encrypted(name.as_ref())),
            };
            let rule = by_name(policy, name, to.port())?;
            has_address(sandbox, name, *to.ip()).await?;
            Ok(Grant::address_verified(name, rule))
        }
    }
}

/// Check of protocols without a name: a `host:port` rule whose host has this address.
pub(super) async fn by_sent_replies(
    sandbox: &SandboxNet,
    policy: &Policy,
    to: SocketAddrV4,
) -> Result<Grant, Denial> {
    let address_verdict = by_address(policy, to, |address| sandbox.is_host_address(address))?;
    if let AddressVerdict::Allowed { rule } = address_verdict {
        return open(sandbox, policy, to, rule, &RequestedName::Missing);
    }
    let mut denial = None;
    for name in sandbox.sent_replies().names_of(*to.ip()) {
        match by_name(policy, &name, to.port()) {
            Ok(rule) => return Ok(Grant::address_verified(&name, rule)),
            Err(other) => denial = Some(other),
        }
    }
    for name in exact_names(policy, to.port()) {
        let Ok(rule) = by_name(policy, name, to.port()) else {
            continue;
        };
        if has_address(sandbox, name, *to.ip()).await.is_ok() {
            return Ok(Grant::address_verified(name, rule));
        }
    }
    Err(denial.unwrap_or_else(|| Denial::by(DenyReason::NotAllowed)))
}

/// Whether the deny list has names, so that a requested name matters even where the address is allowed.
pub(super) fn denies_names(deny: &DenyList) -> bool {
    let is_name = |entry: &String| entry.parse::<Ipv4Net>().is_err();
    !deny.is_empty() && deny.entries().iter().any(is_name)
}

/// Whether the text of an SNI or `Host` is an address.
pub(super) fn is_address(text: &str) -> bool {
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    inner.unwrap_or(text).parse::<IpAddr>().is_ok()
}

/// The address is allowed: no name is needed, but a denied name stays denied, and so does a hidden one
/// (ECH) when names are denied.
fn open(
    sandbox: &SandboxNet,
    policy: &Policy,
    to: SocketAddrV4,
    rule: String,
    requested: &RequestedName,
) -> Result<Grant, Denial> {
    let name = match requested {
        RequestedName::Name(name) => Some(name),
        RequestedName::Encrypted(name) if denies_names(&policy.deny) => {
            return Err(Denial::encrypted(name.as_ref()));
        }
        // The outer name of an encrypted ClientHello is not the real one.
        RequestedName::Missing | RequestedName::Encrypted(_) => None,
    };
    let dns_names = match name {
        Some(name) => {
            not_denied(policy, name)?;
            Vec::new()
        }
        None => sandbox.sent_replies().names_of(*to.ip()),
    };
    Ok(Grant {
        name: name.cloned(),
        rule,
        address_verified: false,
        dns_names,
    })
}

fn not_denied(policy: &Policy, name: &HostName) -> Result<(), Denial> {
    match policy.deny.denies_name(name) {
        Some(entry) => Err(Denial::by(DenyReason::DenyList).name(name).rule(entry)),
        None => Ok(()),
    }
}

/// Checks that the name has the address: by the sent replies, else by a lookup.
async fn has_address(
    sandbox: &SandboxNet,
    name: &HostName,
    address: Ipv4Addr,
) -> Result<(), Denial> {
    if sandbox.sent_replies().contains(name, address) {
        return Ok(());
    }
    match dns::lookup(sandbox, name).await {
        Ok(found) if found.addresses.contains(&address) => Ok(()),
        Ok(_) => Err(Denial::by(DenyReason::WrongAddress).name(name)),
        Err(denied) => Err(Denial {
            reason: denied.reason,
            name: Some(name.clone()),
            rule: denied.rule,
        }),
    }
}

fn exact_names(policy: &Policy, port: u16) -> impl Iterator<Item = &HostName> {
    let rules = policy.allow.name_rules_with_port(port);
    let names = rules.filter_map(|rule| match &rule.target {
        Target::Host(HostPattern::Exact(name)) => Some(name),
        Target::Host(HostPattern::Below(_)) | Target::Net(_) => None,
    });
    names.take(LOOKUPS_MAX)
}

// === impl Grant ===

impl Grant {
    fn address_verified(name: &HostName, rule: String) -> Self {
        Self {
            name: Some(name.clone()),
            rule,
            address_verified: true,
            dns_names: Vec::new(),
        }
    }
}

// === impl Denial ===

impl Denial {
    pub(super) fn by(reason: DenyReason) -> Self {
        Self {
            reason,
            name: None,
            rule: None,
        }
    }

    pub(super) fn name(mut self, name: &HostName) -> Self {
        self.name = Some(name.clone());
        self
    }

    fn rule(mut self, rule: String) -> Self {
        self.rule = Some(rule);
        self
    }

    fn encrypted(name: Option<&HostName>) -> Self {
        Self {
            name: name.cloned(),
            ..Self::by(DenyReason::EncryptedHello)
        }
    }
}

#[cfg(test)]
mod tests;
