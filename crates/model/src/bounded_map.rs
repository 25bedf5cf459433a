//! Environment variables and labels: small maps whose every size is bounded.

use crate::Error;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The environment of a session or a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    try_from = "BTreeMap<String, String>",
    into = "BTreeMap<String, String>"
)]
pub struct Env(BTreeMap<String, String>);

/// What a user hangs on a session to find it again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    try_from = "BTreeMap<String, String>",
    into = "BTreeMap<String, String>"
)]
pub struct Labels(BTreeMap<String, String>);

struct Bounds {
    noun: &'static str,
    entries_max: usize,
    key_bytes_max: usize,
    value_bytes_max: usize,
    total_bytes_max: usize,
}

/// K8E's numbers, so that what its clients send is accepted here.
const ENV: Bounds = Bounds {
    noun: "env",
    entries_max: 64,
    key_bytes_max: 256,
    value_bytes_max: 4096,
    total_bytes_max: 32 * 1024,
};

const LABELS: Bounds = Bounds {
    noun: "labels",
    entries_max: 64,
    key_bytes_max: 63,
    value_bytes_max: 256,
    total_bytes_max: 8 * 1024,
};

macro_rules! map {
    ($name:ident, $bounds:expr) => {
        impl $name {
            /// The entries, by key.
            pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
                self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl TryFrom<BTreeMap<String, String>> for $name {
            type Error = Error;
            fn try_from(map: BTreeMap<String, String>) -> Result<Self, Error> {
                $bounds.check(&map).map(|()| Self(map))
            }
        }

        impl From<$name> for BTreeMap<String, String> {
            fn from(map: $name) -> Self {
                map.0
            }
        }
    };
}

map!(Env, ENV);
map!(Labels, LABELS);

impl Bounds {
    fn check(&self, map: &BTreeMap<String, String>) -> Result<(), Error> {
        let noun = self.noun;
        if map.len() > self.entries_max {
            return Err(Error::invalid(format!(
                "{noun}: {} entries, at most {} are allowed",
                map.len(),
                self.entries_max
            )));
        }
        let mut total = 0;
        for (key, value) in map {
            total += key.len() + value.len();
            if key.is_empty() || key.len() > self.key_bytes_max || key.contains(['=', '\0']) {
                return Err(Error::invalid(format!(
                    "{noun}: key {:?} must be 1 to {} bytes without '=' or NUL",
                    key.chars().take(64).collect::<String>(),
                    self.key_bytes_max
                )));
            }
            if value.len() > self.value_bytes_max || value.contains('\0') {
                return Err(Error::invalid(format!(
                    "{noun}: the value of {key:?} must be at most {} bytes without NUL",
                    self.value_bytes_max
                )));
            }
        }
        if total > self.total_bytes_max {
            return Err(Error::invalid(format!(
                "{noun}: {total} bytes in all, at most {} are allowed",
                self.total_bytes_max
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Result<Env, Error> {
        pairs
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect::<BTreeMap<_, _>>()
            .try_into()
    }

    #[test]
    fn env_is_bounded() {
        assert!(env(&[("A", "1"), ("PATH", "/bin")]).is_ok());
        assert!(env(&[("", "1")]).is_err());
        assert!(env(&[("A=B", "1")]).is_err());
        assert!(env(&[("A", "x\0y")]).is_err());
        assert!(env(&[("A", &"x".repeat(4097))]).is_err());
        assert!(env(&[(&"k".repeat(257), "")]).is_err());
        let many: BTreeMap<_, _> = (0..65).map(|i| (format!("K{i}"), String::new())).collect();
        assert!(Env::try_from(many).is_err());
        let heavy: BTreeMap<_, _> = (0..9)
            .map(|i| (format!("K{i}"), "x".repeat(4000)))
            .collect();
        assert!(Env::try_from(heavy).is_err());
    }
}
