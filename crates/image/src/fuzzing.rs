//! For the crate `fuzz`: what outsiders' bytes reach before anything is written.

use crate::decode::Compression;
use crate::manifest::{Document, Manifest};
use crate::reference::Reference;
use crate::tar::Archive;

/// Uncompressed, of one input.
const BYTES_MAX: u64 = 8 * 1024 * 1024;

/// Reads a layer as the unpacker does; what it has, in words. The paths that would be made come along.
pub fn layer(bytes: &[u8]) -> (String, Vec<Vec<u8>>) {
    let mut paths = Vec::new();
    let reader = Compression::of_magic(bytes).reader(bytes, BYTES_MAX);
    let mut archive = Archive::new(reader);
    loop {
        let entry = match archive.next() {
            Ok(Some(entry)) => entry,
            Ok(None) => return (format!("{} entries", paths.len()), paths),
            Err(error) => return (error.to_string(), paths),
        };
        for path in [&entry.path, &entry.link] {
            match crate::unpack::fuzzed_path(path) {
                Ok(path) => paths.push(path),
                Err(error) => return (error.to_string(), paths),
            }
        }
    }
}

/// Reads a manifest, and a configuration behind a NUL, as the server does; what it is, in words.
pub fn manifest(bytes: &[u8]) -> String {
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let (manifest, config) = (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    match Document::parse(manifest) {
        Ok(Document::Index(digest)) => format!("index {digest}"),
        Ok(Document::Manifest(manifest)) => Manifest::image(&manifest, config)
            .map_or_else(|error| error.to_string(), |image| format!("{image:?}")),
        Err(error) => error.to_string(),
    }
}

/// Reads a reference, and again what it is written as.
pub fn reference(text: &str) -> Option<(String, Option<String>)> {
    let reference: Reference = text.parse().ok()?;
    let again = reference.to_string().parse::<Reference>().ok();
    Some((reference.to_string(), again.map(|again| again.to_string())))
}
