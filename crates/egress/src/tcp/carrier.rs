//! What bytes ride in from one socket to the other.
//!
//! It is memory. `splice` through a pipe spares the copies and was slower in every measurement that
//! decided this: the copies go through a cache that is warm, and the pages of a pipe do not.

use std::io;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Most connections carry less than this in all.
const SMALL_BYTES: usize = 16 * 1024;

/// After so many bytes a connection carries bulk.
const BULK_AFTER_BYTES: usize = 128 * 1024;

/// For bulk: fewer turns, and what was read is still in the cache when it is written.
const LARGE_BYTES: usize = 1024 * 1024;

/// Large ones of all sandboxes together. More connections than this are not each faster for it.
const LARGE_MAX: usize = 32;

/// For bulk when there are no large ones left.
const MEDIUM_BYTES: usize = 64 * 1024;

static LARGE: Semaphore = Semaphore::const_new(LARGE_MAX);

/// One direction's. Silence costs no memory: it has none before the first byte.
#[derive(Default)]
pub(super) struct Carrier {
    buffer: Vec<u8>,
    carried: usize,
    large: Option<SemaphorePermit<'static>>,
}

// === impl Carrier ===

impl Carrier {
    /// Takes what there is, at least a byte; 0 at the end. What was loaded is to be unloaded first.
    pub(super) async fn load(&mut self, from: &TcpStream) -> io::Result<usize> {
        loop {
            from.readable().await?;
            self.grow();
            match from.try_read(&mut self.buffer) {
                Ok(bytes) => {
                    self.carried = self.carried.saturating_add(bytes);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The first `bytes` of it, which were loaded.
    pub(super) fn loaded(&self, bytes: usize) -> &[u8] {
        self.buffer.get(..bytes).unwrap_or_default()
    }

    fn grow(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = vec![0; SMALL_BYTES];
        } else if self.carried >= BULK_AFTER_BYTES && self.buffer.len() == SMALL_BYTES {
            self.large = LARGE.try_acquire().ok();
            let bytes = if self.large.is_some() {
                LARGE_BYTES
            } else {
                MEDIUM_BYTES
            };
            self.buffer = vec![0; bytes];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_what_it_carries_and_gives_back() {
        let grown = |carried| {
            let mut carrier = Carrier {
                carried,
                ..Carrier::default()
            };
            carrier.grow();
            carrier.grow();
            carrier
        };
        assert!(Carrier::default().buffer.is_empty());
        assert_eq!(grown(BULK_AFTER_BYTES - 1).buffer.len(), SMALL_BYTES);
        let mut all: Vec<_> = (0..LARGE_MAX).map(|_| grown(BULK_AFTER_BYTES)).collect();
        assert_eq!(grown(BULK_AFTER_BYTES).buffer.len(), MEDIUM_BYTES);
        let large = |carrier: &Carrier| carrier.buffer.len() == LARGE_BYTES;
        assert!(all.iter().any(large));
        all.clear();
        assert!(large(&grown(BULK_AFTER_BYTES)));
    }
}
