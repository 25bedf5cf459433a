//! Tenants that a principal may make sessions for.

use crate::{Error, KeyId, PrincipalName, TenantId};
use std::sync::Arc;

/// Tenants that one API key may name. All of them are in the error for any other.
const TENANTS_PER_KEY_MAX: usize = 64;

/// How "any tenant" is written in requests, answers and the store. It is no valid tenant.
const ANY: &str = "*";

/// The tenants of a principal, and which of them is its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenants {
    default: TenantId,
    allowed: Allowed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Allowed {
    Any,
    /// The default is the first.
    Only(Arc<[TenantId]>),
}

// === impl Tenants ===

impl Tenants {
    /// Every tenant; the default is `default`.
    pub fn any() -> Self {
        Self {
            default: TenantId::default(),
            allowed: Allowed::Any,
        }
    }

    /// The tenant of an API key that was made without naming any: called like the key, or like its
    /// id where its name is no valid tenant. Names of keys are unique, so no two keys share it.
    pub fn of_key(name: &PrincipalName, id: &KeyId) -> Self {
        let tenant = name.as_str().parse().unwrap_or_else(|_| TenantId::from(id));
        Self {
            allowed: Allowed::Only([tenant.clone()].into()),
            default: tenant,
        }
    }

    /// Tenants as a request names them, the default first: `*` alone is any. None when it names none.
    pub fn parse(entries: &[String]) -> Result<Option<Self>, Error> {
        if entries.len() > TENANTS_PER_KEY_MAX {
            return Err(Error::invalid(format!(
                "an API key has at most {TENANTS_PER_KEY_MAX} tenants: name fewer, or {ANY} for any"
            )));
        }
        let mut only: Vec<TenantId> = Vec::with_capacity(entries.len());
        for entry in entries {
            if entry == ANY {
                if entries.len() == 1 {
                    return Ok(Some(Self::any()));
                }
                return Err(Error::invalid(format!(
                    "tenant {ANY} is any tenant: name it alone, or only the others"
                )));
            }
            let tenant = entry.parse()?;
            if !only.contains(&tenant) {
                only.push(tenant);
            }
        }
        Ok(only.first().cloned().map(|default| Self {
            default,
            allowed: Allowed::Only(only.into()),
        }))
    }

    /// As [`Self::parse`] reads them.
    pub fn entries(&self) -> Vec<String> {
        match &self.allowed {
            Allowed::Any => vec![ANY.to_owned()],
            Allowed::Only(only) => only.iter().map(TenantId::to_string).collect(),
        }
    }

    /// The tenant of a request that names none.
    pub fn default_tenant(&self) -> &TenantId {
        &self.default
    }

    /// Whether sessions may be made for this tenant.
    pub fn allows(&self, tenant: &TenantId) -> bool {
        match &self.allowed {
            Allowed::Any => true,
            Allowed::Only(only) => only.contains(tenant),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(entries: &[&str]) -> Result<Option<Tenants>, Error> {
        let entries: Vec<_> = entries.iter().map(|&entry| entry.to_owned()).collect();
        Tenants::parse(&entries)
    }

    fn tenant(text: &str) -> TenantId {
        text.parse().unwrap()
    }

    #[test]
    fn the_first_tenant_is_the_default() {
        let tenants = parse(&["b", "a", "b"]).unwrap().unwrap();
        assert_eq!(tenants.default_tenant(), &tenant("b"));
        assert_eq!(tenants.entries(), ["b", "a"]);
        assert!(tenants.allows(&tenant("a")) && !tenants.allows(&tenant("default")));
    }

    #[test]
    fn a_star_alone_is_any_tenant() {
        let any = parse(&["*"]).unwrap().unwrap();
        assert_eq!(any, Tenants::any());
        assert_eq!(any.entries(), ["*"]);
        assert_eq!(any.default_tenant(), &tenant("default"));
        assert!(any.allows(&tenant("x")));
        assert!(parse(&["*", "a"]).is_err() && parse(&["a", "*"]).is_err());
    }

    #[test]
    fn lists_are_checked_and_bounded() {
        assert_eq!(parse(&[]), Ok(None));
        assert!(parse(&["A"]).is_err() && parse(&[""]).is_err());
        let many: Vec<_> = (0..=TENANTS_PER_KEY_MAX).map(|n| n.to_string()).collect();
        assert!(Tenants::parse(&many).is_err());
        assert!(Tenants::parse(&many[1..]).is_ok());
    }

    #[test]
    fn a_key_that_names_none_has_one_of_its_own() {
        let id = KeyId::random();
        let of_key = |name: &str| Tenants::of_key(&name.parse().unwrap(), &id);
        assert_eq!(of_key("ann").entries(), ["ann"]);
        assert_eq!(of_key("Ann@example.com").entries(), [id.as_str()]);
    }
}
