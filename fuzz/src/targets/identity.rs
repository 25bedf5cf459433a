//! Credentials: API keys and certificate signing requests.

use crate::outcome;
use k8e_gateway::fuzzing;
use k8e_model::ApiKey;

/// An API key round-trips, and neither a valid nor an invalid one is shown in messages.
pub(super) fn api_key(bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(bytes);
    let key = ApiKey::parse(&text);
    let told = match &key {
        Ok(key) => {
            let shown = key.reveal();
            assert_eq!(ApiKey::parse(&shown).as_ref(), Ok(key));
            assert_eq!(
                fuzzing::bearer(&format!("Bearer {shown}")).as_ref(),
                Some(key)
            );
            assert!(!format!("{key:?}").contains(&shown[4..]));
            "a key"
        }
        Err(error) => {
            let repeated = text.len() >= 8 && error.message.contains(&*text);
            assert!(
                !repeated
                    || "this is no API key: they are k8e_ and 64 hexadecimal digits"
                        .contains(&*text)
            );
            "none"
        }
    };
    let sent = fuzzing::bearer(&text);
    outcome(&format!("{told}{}", sent.is_some()))
}

/// A certificate is issued only for a CSR with a valid signature, and has nothing of its subject.
pub(super) fn certificate_request(bytes: &[u8]) -> u64 {
    outcome(&fuzzing::certificate_request(&String::from_utf8_lossy(
        bytes,
    )))
}
