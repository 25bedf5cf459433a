//! Query strings: percent-encoding, and E2B's filter by metadata, which is encoded three times.

use hyper::Uri;
use std::collections::BTreeMap;

/// Parameters of a query; more are ignored.
const PARAMETERS_MAX: usize = 64;

/// The parameters of a request's query, decoded.
pub(super) struct Query(Vec<(String, String)>);

// === impl Query ===

impl Query {
    pub(super) fn of(uri: &Uri) -> Self {
        let pairs = uri.query().unwrap_or_default().split('&');
        let pairs = pairs.filter(|pair| !pair.is_empty()).take(PARAMETERS_MAX);
        Self(pairs.map(|pair| decoded_pair(pair, true)).collect())
    }

    /// The first value of a parameter.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The pairs that E2B's clients write into `metadata`.
    pub(super) fn metadata(&self) -> Option<BTreeMap<String, String>> {
        let text = decode(self.get("metadata")?, false);
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Some(pairs.map(|pair| decoded_pair(pair, false)).collect())
    }

    /// The values of a parameter that is a list with commas.
    pub(super) fn list(&self, name: &str) -> Vec<&str> {
        let values = self.0.iter().filter(|(key, _)| key == name);
        let values = values.flat_map(|(_, value)| value.split(','));
        values.filter(|value| !value.is_empty()).collect()
    }
}

fn decoded_pair(pair: &str, plus: bool) -> (String, String) {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    (decode(name, plus), decode(value, plus))
}

/// Percent-decodes; `plus` is a space too. What is not an escape stays as it is.
pub(super) fn decode(text: &str, plus: bool) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let digit = |at: usize| {
            bytes
                .get(at)
                .and_then(|byte| char::from(*byte).to_digit(16))
        };
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(u8::try_from(high << 4 | low).unwrap_or(b'?'));
                at += 3;
                continue;
            }
            (b'+', ..) if plus => decoded.push(b' '),
            _ => decoded.push(*byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_three_times() {
        let uri: Uri = "/v2/sandboxes?metadata=a%252520b%3Dc%252526d&state=running%2Cpaused"
            .parse()
            .unwrap();
        let query = Query::of(&uri);
        let metadata = query.metadata().unwrap();
        assert_eq!(metadata.get("a b").map(String::as_str), Some("c&d"));
        assert_eq!(query.list("state"), ["running", "paused"]);
        assert_eq!(query.get("limit"), None);
    }

    #[test]
    fn escapes_that_are_none_stay() {
        assert_eq!(decode("100%", true), "100%");
        assert_eq!(decode("%zz%4", true), "%zz%4");
        assert_eq!(decode("a+b%2B", true), "a b+");
        assert_eq!(decode("a+b", false), "a+b");
    }
}
