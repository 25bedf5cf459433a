//! Relay buffer: the heap buffer between the two sockets of a direction. It grows with the traffic.
//!
//! `splice` through a pipe would avoid the copies, but was slower in every measurement: the copies hit
//! the CPU cache, the pages of a pipe do not.

use std::io;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

/// First size of a buffer: most connections relay less than this in total.
const SMALL_BYTES: usize = 16 * 1024;

/// A connection that has relayed this many bytes is a bulk transfer.
const BULK_AFTER_BYTES: usize = 128 * 1024;

/// Buffer size for bulk transfers: fewer system calls, and still small enough for the CPU cache.
const LARGE_BYTES: usize = 1024 * 1024;

/// Large buffers of all sandboxes together. With more bulk transfers than this, none is faster for it.
const LARGE_MAX: usize = 32;

/// Buffer size for bulk transfers when all large buffers are taken.
const MEDIUM_BYTES: usize = 64 * 1024;

static LARGE: Semaphore = Semaphore::const_new(LARGE_MAX);

/// The buffer of one direction. It is empty until the first byte, so idle connections cost no memory.
pub(super) struct RelayBuffer {
    /// Upper bound of a single read, from the bandwidth limit.
    bytes_max: usize,
    buffer: Vec<u8>,
    relayed: usize,
    pool: &'static Semaphore,
    large: Option<SemaphorePermit<'static>>,
}

// === impl RelayBuffer ===

impl RelayBuffer {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            buffer: Vec::new(),
            relayed: 0,
            pool: &LARGE,
            large: None,
        }
    }

    /// Reads what is available, at least one byte; 0 at EOF. Overwrites what was read before.
    pub(super) async fn read_from(&mut self, from: &TcpStream) -> io::Result<usize> {
        loop {
            from.readable().await?;
            self.grow();
            match from.try_read(&mut self.buffer) {
                Ok(bytes) => {
                    self.relayed = self.relayed.saturating_add(bytes);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The first `bytes` of the buffer.
    pub(super) fn filled(&self, bytes: usize) -> &[u8] {
        self.buffer.get(..bytes).unwrap_or_default()
    }

    fn grow(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = vec![0; SMALL_BYTES.min(self.bytes_max)];
        } else if self.relayed >= BULK_AFTER_BYTES && self.buffer.len() == SMALL_BYTES {
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

    fn grown(pool: &'static Semaphore, bytes_max: usize, relayed: usize) -> RelayBuffer {
        let mut relay_buffer = RelayBuffer {
            relayed,
            pool,
            ..RelayBuffer::new(bytes_max)
        };
        relay_buffer.grow();
        relay_buffer.grow();
        relay_buffer
    }

    #[test]
    fn it_grows_for_bulk_transfers_and_gives_large_buffers_back() {
        static ONE: Semaphore = Semaphore::const_new(1);
        let bytes = |relay_buffer: &RelayBuffer| relay_buffer.buffer.len();
        let bulk = || grown(&ONE, usize::MAX, BULK_AFTER_BYTES);
        assert_eq!(bytes(&RelayBuffer::new(usize::MAX)), 0);
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
    fn it_never_exceeds_the_bound_of_a_read() {
        static ONE: Semaphore = Semaphore::const_new(1);
        for bytes_max in [1, SMALL_BYTES, 100_000] {
            let relay_buffer = grown(&ONE, bytes_max, BULK_AFTER_BYTES);
            assert_eq!(relay_buffer.buffer.len(), bytes_max);
        }
    }
}
