//! SHA-256 of bytes as they pass by.

use k8e_model::Digest;
use ring::digest::{Context, SHA256};
use std::io::{self, Read};

/// A digest under way.
#[derive(Clone)]
pub struct Hasher(Context);

/// A reader that hashes all that is read from it.
pub(crate) struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
}

/// The digest of bytes that are at hand.
pub fn digest_of(bytes: &[u8]) -> Digest {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.finish()
}

// === impl Hasher ===

impl Default for Hasher {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them.
    pub fn finish(self) -> Digest {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(self.0.finish().as_ref());
        Digest::from_bytes(&bytes)
    }
}

// === impl HashingReader ===

impl<R> HashingReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        let hasher = Hasher::default();
        Self { inner, hasher }
    }

    pub(crate) fn finish(self) -> Digest {
        self.hasher.finish()
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}
