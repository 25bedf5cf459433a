//! API keys: 256 random bits, shown once and stored as a hash.

use crate::Error;
use std::fmt;

const KEY_BYTES: usize = 32;

/// Prefix of a key as it is shown.
const PREFIX: &str = "k8e_";

/// Prefix that E2B clients require for the same key; accepted too.
const PREFIX_E2B: &str = "e2b_";

/// An API key. Debug does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey([u8; KEY_BYTES]);

/// Hash of a key, as stored. SHA-256 without salt is enough for 256 random bits.
#[derive(Clone, Copy)]
pub struct KeyHash(pub [u8; 32]);

// === impl ApiKey ===

impl ApiKey {
    /// A new one.
    pub fn random() -> Self {
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes).expect("the kernel always has random bytes after boot");
        Self(bytes)
    }

    /// As a client sends it: 64 hexadecimal digits, with a prefix or without.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let digits = [PREFIX, PREFIX_E2B]
            .into_iter()
            .find_map(|prefix| text.strip_prefix(prefix))
            .unwrap_or(text)
            .as_bytes();
        // Without what was sent: it may be a key that only lacks a digit.
        let wrong =
            || Error::invalid("this is no API key: they are k8e_ and 64 hexadecimal digits");
        if digits.len() != 2 * KEY_BYTES {
            return Err(wrong());
        }
        let mut bytes = [0; KEY_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            let (Some(high), Some(low)) = (digit(0), digit(1)) else {
                return Err(wrong());
            };
            *byte = u8::try_from(high << 4 | low).map_err(|_| wrong())?;
        }
        Ok(Self(bytes))
    }

    /// As text, shown once.
    pub fn reveal(&self) -> String {
        let digits = self.0.iter().map(|byte| format!("{byte:02x}"));
        PREFIX.to_owned() + &digits.collect::<String>()
    }

    /// What is hashed.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Without the key.
impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

// === impl KeyHash ===

/// Constant-time comparison.
impl PartialEq for KeyHash {
    fn eq(&self, other: &Self) -> bool {
        let differs = self.0.iter().zip(&other.0);
        let differs = differs.fold(0, |all, (a, b)| all | std::hint::black_box(a ^ b));
        differs == 0
    }
}

impl Eq for KeyHash {}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_back_in_every_spelling() {
        let key = ApiKey::random();
        let text = key.reveal();
        let digits = text.strip_prefix("k8e_").unwrap();
        assert_eq!(digits.len(), 64);
        for spelling in [&text, digits, &format!("e2b_{digits}")] {
            assert_eq!(ApiKey::parse(spelling).unwrap(), key);
        }
        assert_ne!(ApiKey::random(), key);
    }

    #[test]
    fn what_is_no_key_is_not_repeated() {
        for bad in [
            "",
            "k8e_",
            &"g".repeat(64),
            &"a".repeat(63),
            &"é".repeat(32),
        ] {
            let error = ApiKey::parse(bad).unwrap_err();
            assert!(bad.is_empty() || bad == "k8e_" || !error.message.contains(bad));
        }
    }

    #[test]
    fn nothing_secret_is_printed() {
        let key = ApiKey::random();
        assert_eq!(format!("{key:?}"), "ApiKey(…)");
        assert_eq!(format!("{:?}", KeyHash([7; 32])), "KeyHash(…)");
    }

    #[test]
    fn hashes_are_compared_whole() {
        let mut other = [7; 32];
        assert_eq!(KeyHash([7; 32]), KeyHash(other));
        other[31] = 8;
        assert_ne!(KeyHash([7; 32]), KeyHash(other));
    }
}
