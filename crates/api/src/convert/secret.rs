//! Secrets: names, values and references.

use crate::v1;
use k8e_model::{Error, SecretName, SecretRef, SecretRefs, SecretValue};

/// The secret that a call names; an empty key is the default one.
pub fn secret_name(name: &str, key: &str) -> Result<SecretName, Error> {
    SecretName::new(name, key)
}

/// A value, checked. The bytes of the message are not kept.
pub fn secret_value(value: prost::bytes::Bytes) -> Result<SecretValue, Error> {
    SecretValue::new(value.into())
}

/// The secrets of a new session.
pub(super) fn refs(wire: Vec<v1::SecretRef>) -> Result<SecretRefs, Error> {
    let wanted = |wire: v1::SecretRef| {
        Ok(SecretRef {
            secret: SecretName::new(&wire.secret_name, &wire.key)
                .map_err(|e| Error::invalid(format!("secret_refs: {}", e.message)))?,
            env_var: wire.env_var,
        })
    };
    let refs: Result<Vec<_>, Error> = wire.into_iter().map(wanted).collect();
    refs?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(secret_name: &str, env_var: &str) -> v1::SecretRef {
        v1::SecretRef {
            secret_name: secret_name.to_owned(),
            key: String::new(),
            env_var: env_var.to_owned(),
        }
    }

    #[test]
    fn refs_are_checked() {
        let refs = refs(vec![wire("github", "TOKEN")]).unwrap();
        assert_eq!(refs.iter().next().unwrap().secret.key(), "value");
        for bad in [wire("", "TOKEN"), wire("github", ""), wire("a/b", "X")] {
            let error = super::refs(vec![bad]).unwrap_err().message;
            assert!(error.starts_with("secret_refs: "), "{error}");
        }
    }

    #[test]
    fn a_request_does_not_print_its_secret() {
        let request = v1::SetSecretRequest {
            name: "pw".to_owned(),
            value: "hunter2".into(),
            ..Default::default()
        };
        let shown = format!("{request:?}");
        assert!(
            shown.contains("pw") && !shown.contains("hunter2"),
            "{shown}"
        );
        let made = v1::CreateKeyResponse {
            secret: "k8e_00".to_owned(),
            ..Default::default()
        };
        assert!(!format!("{made:?}").contains("k8e_00"));
    }
}
