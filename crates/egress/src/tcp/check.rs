//! Whether a connection may be made: from the policy, the address, and what the client says.
//!
//! The order is what makes it safe. Deny lists and the machine's own addresses come first, whatever
//! any rule says; then rules about networks; only then names, which the client chooses, and which
//! therefore count only together with an address that the name really has.

mod still;

pub(super) use still::still;

use crate::dns;
use crate::ward::{Policy, Ward};
use k8e_model::egress::{
    DenyList, DenyReason, EgressPolicy, HostName, HostPattern, Ipv4Net, Target, is_never, is_public,
};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

/// Names of `host:port` rules that are looked up for one connection when none of what the sandbox
/// was told fits. Each is a question to a resolver, and the sandbox can have as many as it likes.
const LOOKUPS_MAX: usize = 8;

/// What the address alone says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ground {
    /// It is allowed, unless a name is shown that is denied.
    Open {
        /// What allows it.
        rule: String,
    },
    /// Only a name can allow it.
    ByName,
}

/// What a client says of whom it wants to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// This name.
    Name(HostName),
    /// No name, or an address.
    Nothing,
    /// This name or none, and perhaps another one that only the server can read.
    Encrypted(Option<HostName>),
}

/// A connection that may be made, and may stay as long as this holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pass {
    /// Under which name.
    pub(super) name: Option<HostName>,
    /// What allows it.
    pub(super) rule: String,
    /// Whether the address is known to be the name's. Where no name is needed it is not asked.
    pub(super) checked: bool,
    /// Without a name: all names that the sandbox was told are at that address.
    pub(super) told: Vec<HostName>,
}

/// A connection that may not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denial {
    pub(super) reason: DenyReason,
    /// The name it was for.
    pub(super) name: Option<HostName>,
    /// The entry that denies it.
    pub(super) rule: Option<String>,
}

/// What the address says before a byte is read.
pub(super) fn by_address(
    policy: &Policy,
    to: SocketAddrV4,
    is_this_machine: impl Fn(Ipv4Addr) -> bool,
) -> Result<Ground, Denial> {
    let (address, port) = (*to.ip(), to.port());
    if let Some(entry) = policy.deny.denies_address(address) {
        return Err(Denial::by(DenyReason::DenyList).rule(entry));
    }
    if is_never(address) || is_this_machine(address) {
        return Err(Denial::by(DenyReason::ThisMachine));
    }
    if let Some(rule) = policy.allow.rule_for_address(address, port) {
        let rule = rule.to_string();
        return Ok(Ground::Open { rule });
    }
    if !is_public(address) {
        return Err(Denial::by(DenyReason::PrivateAddress));
    }
    match policy.allow {
        EgressPolicy::None => Err(Denial::by(DenyReason::NotAllowed)),
        EgressPolicy::Only(_) => Ok(Ground::ByName),
        EgressPolicy::All => {
            let rule = "all".to_owned();
            Ok(Ground::Open { rule })
        }
    }
}

/// The rule that allows the name on this port.
pub(super) fn by_name(policy: &Policy, name: &HostName, port: u16) -> Result<String, Denial> {
    not_denied(policy, name)?;
    let denied = |reason| Denial::by(reason).name(name);
    match policy.allow.rule_for_name(name, port) {
        Some(rule) => Ok(rule.to_string()),
        None if policy.allow.allows_name(name) => Err(denied(DenyReason::PortClosed)),
        None => Err(denied(DenyReason::NotAllowed)),
    }
}

/// The decision where a client says whom it wants: TLS and HTTP.
pub(super) async fn by_said(
    ward: &Ward,
    policy: &Policy,
    to: SocketAddrV4,
    said: &Said,
) -> Result<Pass, Denial> {
    match by_address(policy, to, |address| ward.is_this_machine(address))? {
        Ground::Open { rule } => open(ward, policy, to, rule, said),
        Ground::ByName => {
            let name = match said {
                Said::Name(name) => name,
                Said::Nothing => return Err(Denial::by(DenyReason::NoName)),
                Said::Encrypted(name) => return Err(Denial::encrypted(name.as_ref())),
            };
            let rule = by_name(policy, name, to.port())?;
            has_address(ward, name, *to.ip()).await?;
            Ok(Pass::checked(name, rule))
        }
    }
}

/// The decision where no name is shown: some `host:port` rule, and its host has that address.
pub(super) async fn by_told(
    ward: &Ward,
    policy: &Policy,
    to: SocketAddrV4,
) -> Result<Pass, Denial> {
    let ground = by_address(policy, to, |address| ward.is_this_machine(address))?;
    if let Ground::Open { rule } = ground {
        return open(ward, policy, to, rule, &Said::Nothing);
    }
    let mut denial = None;
    for name in ward.answers().names_of(*to.ip()) {
        match by_name(policy, &name, to.port()) {
            Ok(rule) => return Ok(Pass::checked(&name, rule)),
            Err(other) => denial = Some(other),
        }
    }
    for name in exact_names(policy, to.port()) {
        let Ok(rule) = by_name(policy, name, to.port()) else {
            continue;
        };
        if has_address(ward, name, *to.ip()).await.is_ok() {
            return Ok(Pass::checked(name, rule));
        }
    }
    Err(denial.unwrap_or_else(|| Denial::by(DenyReason::NotAllowed)))
}

/// Whether a name that is shown can make a difference on open ground.
pub(super) fn denies_names(deny: &DenyList) -> bool {
    let is_name = |entry: &String| entry.parse::<Ipv4Net>().is_err();
    !deny.is_empty() && deny.entries().iter().any(is_name)
}

/// Whether a text is an address in a spelling that may stand in SNI or `Host`.
pub(super) fn is_address(text: &str) -> bool {
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    inner.unwrap_or(text).parse::<IpAddr>().is_ok()
}

/// Open ground: no name is needed, but one that is denied stays denied, and so does one that may
/// hide behind another.
fn open(
    ward: &Ward,
    policy: &Policy,
    to: SocketAddrV4,
    rule: String,
    said: &Said,
) -> Result<Pass, Denial> {
    let name = match said {
        Said::Name(name) => Some(name),
        Said::Encrypted(name) if denies_names(&policy.deny) => {
            return Err(Denial::encrypted(name.as_ref()));
        }
        // What is shown in front of a name that cannot be read is not its name.
        Said::Nothing | Said::Encrypted(_) => None,
    };
    let told = match name {
        Some(name) => {
            not_denied(policy, name)?;
            Vec::new()
        }
        None => ward.answers().names_of(*to.ip()),
    };
    Ok(Pass {
        name: name.cloned(),
        rule,
        checked: false,
        told,
    })
}

fn not_denied(policy: &Policy, name: &HostName) -> Result<(), Denial> {
    match policy.deny.denies_name(name) {
        Some(entry) => Err(Denial::by(DenyReason::DenyList).name(name).rule(entry)),
        None => Ok(()),
    }
}

/// What the sandbox was told; what it was not told, or what was forgotten, is asked.
async fn has_address(ward: &Ward, name: &HostName, address: Ipv4Addr) -> Result<(), Denial> {
    if ward.answers().has(name, address) {
        return Ok(());
    }
    match dns::look_up(ward, name).await {
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

// === impl Pass ===

impl Pass {
    fn checked(name: &HostName, rule: String) -> Self {
        Self {
            name: Some(name.clone()),
            rule,
            checked: true,
            told: Vec::new(),
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
