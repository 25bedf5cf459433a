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
pub(super) struct Carrier {
    /// No more than this at once.
    bytes_max: usize,
    buffer: Vec<u8>,
    carried: usize,
    pool: &'static Semaphore,
    large: Option<SemaphorePermit<'static>>,
}

// === impl Carrier ===

impl Carrier {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            buffer: Vec::new(),
            carried: 0,
            pool: &LARGE,
            large: None,
        }
    }

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
            self.buffer = vec![0; SMALL_BYTES.min(self.bytes_max)];
        } else if self.carried >= BULK_AFTER_BYTES && self.buffer.len() == SMALL_BYTES {
            self.large = self.pool.try_acquire().ok();
            let bytes = match &self.large {
                Some(_) => LARGE_BYTES,
                None => MEDIUM_BYTES,
            };
            self.buffer = vec![0; bytes.min(self.bytes_max)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grown(pool: &'static Semaphore, bytes_max: usize, carried: usize) -> Carrier {
        let mut carrier = Carrier {
            carried,
            pool,
            ..Carrier::new(bytes_max)
        };
        carrier.grow();
        carrier.grow();
        carrier
    }

    #[test]
    fn it_grows_with_what_it_carries_and_gives_back() {
        static ONE: Semaphore = Semaphore::const_new(1);
        let bytes = |carrier: &Carrier| carrier.buffer.len();
        let bulk = || grown(&ONE, usize::MAX, BULK_AFTER_BYTES);
        assert_eq!(bytes(&Carrier::new(usize::MAX)), 0);
        assert_eq!(
            bytes(&grown(&ONE, usize::MAX, BULK_AFTER_BYTES - 1)),
            SMALL_BYTES
        );
        let first = bulk();
        assert_eq!(bytes(&first), LARGE_BYTES);
        assert_eq!(bytes(&bulk()), MEDIUM_BYTES);
        drop(first);
        assert_eq!(bytes(&bulk()), LARGE_BYTES);
    }

    #[test]
    fn it_takes_no_more_at_once_than_it_should() {
        static ONE: Semaphore = Semaphore::const_new(1);
        for bytes_max in [1, SMALL_BYTES, 100_000] {
            let carrier = grown(&ONE, bytes_max, BULK_AFTER_BYTES);
            assert_eq!(carrier.buffer.len(), bytes_max);
        }
    }
}
