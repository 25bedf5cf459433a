//! Secrets: values for the environment of commands, never returned by any call.

use crate::principal::check_name;
use crate::{Env, Error};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Secrets of one session, as in the Go K8E.
pub const SECRET_REFS_MAX: usize = 32;

/// A certificate chain with its key fits; the kernel takes 128 KiB for one variable.
const VALUE_BYTES_MAX: usize = 32 * 1024;

/// What a secret has when nobody says: most have one value.
const KEY_DEFAULT: &str = "value";

/// A secret's name and which of its values, as in `github:token`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SecretName {
    name: String,
    key: String,
}

/// Value of a secret. Debug does not print it.
#[derive(Clone)]
pub struct SecretValue(Vec<u8>);

/// Which secret a session's commands get as which variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretRef {
    /// Which secret.
    pub secret: SecretName,
    /// The variable.
    pub env_var: String,
}

/// A session's secrets, by variable: bounded, and each variable once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<SecretRef>", into = "Vec<SecretRef>")]
pub struct SecretRefs(Vec<SecretRef>);

// === impl SecretName ===

impl SecretName {
    /// An empty key is the default one.
    pub fn new(name: &str, key: &str) -> Result<Self, Error> {
        check_name(name, "secret name")?;
        let key = if key.is_empty() { KEY_DEFAULT } else { key };
        check_name(key, "secret key")?;
        Ok(Self {
            name: name.to_owned(),
            key: key.to_owned(),
        })
    }

    /// The secret.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which of its values.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.key)
    }
}

// === impl SecretValue ===

impl SecretValue {
    /// What a variable can hold.
    pub fn new(value: Vec<u8>) -> Result<Self, Error> {
        if value.len() > VALUE_BYTES_MAX || value.contains(&0) {
            return Err(Error::invalid(format!(
                "a secret's value must be at most {VALUE_BYTES_MAX} bytes without NUL: it becomes a variable"
            )));
        }
        Ok(Self(value))
    }

    /// For the command it is meant for.
    pub fn reveal(&self) -> &[u8] {
        &self.0
    }
}

/// Without the value, and without its length.
impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue(…)")
    }
}

// === impl SecretRefs ===

impl SecretRefs {
    /// By variable.
    pub fn iter(&self) -> impl Iterator<Item = &SecretRef> {
        self.0.iter()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl TryFrom<Vec<SecretRef>> for SecretRefs {
    type Error = Error;
    fn try_from(mut refs: Vec<SecretRef>) -> Result<Self, Error> {
        if refs.len() > SECRET_REFS_MAX {
            return Err(Error::invalid(format!(
                "secret_refs: {} entries, at most {SECRET_REFS_MAX} are allowed",
                refs.len()
            )));
        }
        let names: BTreeMap<_, _> = refs
            .iter()
            .map(|wanted| (wanted.env_var.clone(), String::new()))
            .collect();
        if names.len() < refs.len() {
            return Err(Error::invalid(
                "secret_refs: two secrets for one variable: each needs its own",
            ));
        }
        // The same rules as for any variable.
        Env::try_from(names).map_err(|e| Error::invalid(format!("secret_refs: {}", e.message)))?;
        refs.sort_by(|a, b| a.env_var.cmp(&b.env_var));
        Ok(Self(refs))
    }
}

impl From<SecretRefs> for Vec<SecretRef> {
    fn from(refs: SecretRefs) -> Self {
        refs.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(env_var: &str) -> SecretRef {
        SecretRef {
            secret: SecretName::new("github", "").unwrap(),
            env_var: env_var.to_owned(),
        }
    }

    #[test]
    fn names_have_a_default_key() {
        let name = SecretName::new("github", "").unwrap();
        assert_eq!(name.to_string(), "github:value");
        assert!(SecretName::new("", "token").is_err());
        assert!(SecretName::new("a:b", "token").is_err());
        assert!(SecretName::new("github", "a/b").is_err());
    }

    #[test]
    fn values_are_bounded_and_never_printed() {
        let value = SecretValue::new(b"hunter2".to_vec()).unwrap();
        assert_eq!(value.reveal(), b"hunter2");
        assert_eq!(format!("{value:?}"), "SecretValue(…)");
        assert!(SecretValue::new(vec![b'x'; VALUE_BYTES_MAX + 1]).is_err());
        assert!(SecretValue::new(b"a\0b".to_vec()).is_err());
    }

    #[test]
    fn each_variable_has_one_secret() {
        let refs = SecretRefs::try_from(vec![wanted("B"), wanted("A")]).unwrap();
        let order: Vec<_> = refs.iter().map(|wanted| wanted.env_var.as_str()).collect();
        assert_eq!(order, ["A", "B"]);
        for bad in [
            vec![wanted("A"), wanted("A")],
            vec![wanted("A=B")],
            vec![wanted("")],
        ] {
            assert!(SecretRefs::try_from(bad).is_err());
        }
        let many = (0..=SECRET_REFS_MAX).map(|n| wanted(&format!("A{n}")));
        assert!(SecretRefs::try_from(many.collect::<Vec<_>>()).is_err());
    }
}
