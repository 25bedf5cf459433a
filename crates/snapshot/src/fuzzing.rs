//! For fuzz targets: the decoders of what guests and clients send, without a store behind them where that is possible.

use crate::{KEY_BYTES, Owner, Quota, Root, import, manifest};
use std::path::Path;

/// Reads bytes as a stream of entries, as manifests have them. Returns what was said, and the paths of valid entries.
pub fn entries(mut bytes: &[u8]) -> (String, Vec<Vec<u8>>) {
    let mut paths = Vec::new();
    loop {
        match manifest::next_entry(bytes) {
            Ok(Some((entry, rest))) => {
                if let Err(error) = entry.check() {
                    return (error.to_string(), paths);
                }
                paths.push(entry.path.to_vec());
                bytes = rest;
            }
            Ok(None) => return (format!("{} entries", paths.len().min(3)), paths),
            Err(error) => return (error.to_string(), paths),
        }
    }
}

/// Reads bytes as a root, and as an archive of anybody's into an empty store in `dir`.
pub fn archive(bytes: &[u8], dir: &Path) -> String {
    let root = Root::decode_checked(bytes).map_or_else(|e| e.to_string(), |_| "root".to_owned());
    let quota = Quota {
        bytes_max: 1024 * 1024,
    };
    let imported = Owner::open(dir, quota)
        .and_then(|mut owner| import(&mut owner, bytes, &[0; KEY_BYTES], None));
    let imported = imported.map_or_else(|e| e.to_string(), |_| "imported".to_owned());
    format!("{root}; {imported}")
}
