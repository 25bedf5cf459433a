//! Path parsing: percent-decoding, and normalization to a path relative to a root.
//!
//! This is lexical only. The guest keeps a path beneath its root: it opens one component after the other and follows no
//! link out.

use crate::agent::Failure;
use k8e_wire::proto::ErrorCode;

/// Percent-decodes. Invalid escapes are left as they are.
pub(crate) fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let escape = bytes.get(at + 1..at + 3).filter(|_| *byte == b'%');
        match escape.and_then(hex) {
            Some(value) => {
                decoded.push(value);
                at += 3;
            }
            None => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    decoded
}

/// Normalizes a path: no `.`, `..` or empty components, relative to the root; empty for the root itself.
pub(crate) fn beneath_root(path: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => {
                if parts.pop().is_none() {
                    let shown = String::from_utf8_lossy(path);
                    let message = format!("path {shown:?} leads out of the sandbox's root");
                    return Err(Failure::new(ErrorCode::Outside, message));
                }
            }
            part => parts.push(part),
        }
    }
    Ok(parts.join(&b'/'))
}

/// The value of a query parameter.
pub(crate) fn parameter(query: Option<&str>, name: &str) -> Option<String> {
    query?.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (key == name).then(|| String::from_utf8_lossy(&decode(value)).into_owned())
    })
}

fn hex(digits: &[u8]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let value = digit(*digits.first()?)? * 16 + digit(*digits.get(1)?)?;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_once() {
        assert_eq!(decode("a%2Fb%2525%zz%4"), b"a/b%25%zz%4");
        assert_eq!(decode("%E2%82%AC"), "€".as_bytes());
    }

    #[test]
    fn paths_above_the_root_are_refused() {
        let good = |path: &str| String::from_utf8(beneath_root(path.as_bytes()).unwrap()).unwrap();
        assert_eq!(good("/a//b/./c/"), "a/b/c");
        assert_eq!(good("a/../b"), "b");
        assert_eq!(good("/"), "");
        for bad in ["..", "/..", "a/../../b", "../x"] {
            let failed = beneath_root(bad.as_bytes()).unwrap_err();
            assert_eq!(failed.code, ErrorCode::Outside, "{bad}");
        }
    }

    #[test]
    fn parameters_are_found_by_name() {
        let query = Some("mode=0644&recursive");
        assert_eq!(parameter(query, "mode").as_deref(), Some("0644"));
        assert_eq!(parameter(query, "recursive").as_deref(), Some(""));
        assert_eq!(parameter(query, "mod"), None);
        assert_eq!(parameter(None, "mode"), None);
    }
}
