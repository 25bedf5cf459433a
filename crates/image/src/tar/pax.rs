//! PAX records: `LENGTH KEY=VALUE\n`, each as long as it says.

use super::damaged;
use super::sparse::PaxMap;
use crate::error::ImageError;

/// Extended attributes of one file.
const XATTRS_MAX: usize = 128;

/// The records that mean something to us.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) sparse: Option<PaxMap>,
}

// === impl Records ===

impl Records {
    pub(super) fn parse(mut bytes: &[u8]) -> Result<Self, ImageError> {
        let bad = || damaged("a PAX record is malformed");
        let mut records = Self::default();
        let mut sparse = PaxMap::default();
        while !bytes.is_empty() {
            let digits = bytes
                .iter()
                .position(|byte| *byte == b' ')
                .ok_or_else(bad)?;
            let length: usize = ascii(&bytes[..digits])
                .and_then(|text| text.parse().ok())
                .ok_or_else(bad)?;
            // A digit, a blank, an equals sign and a newline at least.
            if length > bytes.len() || length < digits + 3 || bytes[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &bytes[digits + 1..length - 1];
            bytes = &bytes[length..];
            let equals = record
                .iter()
                .position(|byte| *byte == b'=')
                .ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            records.take(key, value, &mut sparse).ok_or_else(bad)?;
        }
        if sparse.is_there() {
            if let Some(name) = sparse.name.take() {
                records.path = Some(name);
            }
            records.sparse = Some(sparse);
        }
        Ok(records)
    }

    /// None when the value makes no sense.
    fn take(&mut self, key: &[u8], value: &[u8], sparse: &mut PaxMap) -> Option<()> {
        let digits = || ascii(value).filter(|text| !text.starts_with('+'));
        let number = || digits()?.parse::<u64>().ok();
        let text = || (!value.contains(&0) && !value.is_empty()).then(|| value.to_vec());
        match key {
            b"path" => self.path = Some(text()?),
            b"linkpath" => self.link = Some(text()?),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(number()?),
            b"gid" => self.gid = Some(number()?),
            b"mtime" => self.mtime = Some(time(digits()?)?),
            b"GNU.sparse.major" => sparse.major = Some(number()?),
            b"GNU.sparse.minor" => sparse.minor = Some(number()?),
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => sparse.size = Some(number()?),
            b"GNU.sparse.name" => sparse.name = Some(text()?),
            b"GNU.sparse.map" => sparse.map = Some(value.to_vec()),
            // Version 0.0 repeats these, which only its own tar could read.
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => return None,
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if self.xattrs.len() >= XATTRS_MAX || name.is_empty() || name.contains(&0) {
                        return None;
                    }
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Some(())
    }
}

fn ascii(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.is_ascii())
}

/// Seconds with a fraction of any length.
fn time(text: &str) -> Option<(i64, u32)> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = seconds.parse().ok()?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanos = nanos.fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'));
    // The fraction goes away from zero; the kernel's always forward.
    match text.starts_with('-') && nanos > 0 {
        true => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos)),
        false => Some((seconds, nanos)),
    }
}
