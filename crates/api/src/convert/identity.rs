//! API keys and their principals.

use k8e_model::{Error, PrincipalName};
use std::time::Duration;

/// Prefix of a session's owner when that is the principal of a key.
pub const PRINCIPAL_PREFIX: &str = "user:";

/// Ten years. Longer is a typo; 0 is how to say "for ever".
const EXPIRES_S_MAX: i64 = 3660 * 24 * 3600;

/// A principal's name, with or without its prefix; none when it is empty.
pub fn principal_name(text: &str) -> Result<Option<PrincipalName>, Error> {
    match text.strip_prefix(PRINCIPAL_PREFIX).unwrap_or(text) {
        "" => Ok(None),
        name => name.parse().map(Some),
    }
}

/// How long a new key is valid, in seconds; 0 is for ever.
pub fn expires_in(seconds: i64) -> Result<Option<Duration>, Error> {
    match seconds {
        0 => Ok(None),
        1..=EXPIRES_S_MAX => Ok(Some(Duration::from_secs(seconds.unsigned_abs()))),
        _ => Err(Error::invalid(format!(
            "an API key cannot expire in {seconds} seconds: use 1 to {EXPIRES_S_MAX}, or never"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_be_written_as_they_are_shown() {
        let name = |text| principal_name(text).unwrap().map(String::from);
        assert_eq!(name(""), None);
        assert_eq!(name("ann").as_deref(), Some("ann"));
        assert_eq!(name("user:ann").as_deref(), Some("ann"));
        assert!(principal_name("cert:admin").is_err());
    }

    #[test]
    fn times_are_bounded() {
        assert_eq!(expires_in(0), Ok(None));
        assert_eq!(expires_in(5), Ok(Some(Duration::from_secs(5))));
        assert!(expires_in(-1).is_err());
        assert!(expires_in(i64::MAX).is_err());
    }
}
