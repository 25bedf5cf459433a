//! Bounded queue of changes on their way to the host.

use k8e_wire::proto::{FileChange, FileEvent, FileEvents};
use std::collections::VecDeque;

/// Changes that wait for the host, and their bytes. A host that does not read gets an overflow for the rest.
const EVENTS_MAX: usize = 4096;
const BYTES_MAX: usize = 512 * 1024;

/// Changes and bytes of one reply, well below the frame limit.
const BATCH_EVENTS: usize = 256;
const BATCH_BYTES: usize = 200 * 1024;

/// Bytes of a change beside its path.
const EVENT_BYTES: usize = 64;

/// Changes that were not sent yet.
#[derive(Debug, Default)]
pub(super) struct Queue {
    events: VecDeque<FileEvent>,
    bytes: usize,
}

// === impl Queue ===

impl Queue {
    /// Appends a change; one for which there is no room becomes an overflow.
    pub(super) fn push(&mut self, event: FileEvent) {
        let bytes = size(&event);
        if self.events.len() >= EVENTS_MAX || self.bytes + bytes > BYTES_MAX {
            return self.overflow();
        }
        self.bytes += bytes;
        self.events.push_back(event);
    }

    /// Reports that changes were lost at this point. Several in a row are one.
    pub(super) fn overflow(&mut self) {
        let overflow = FileEvent {
            change: FileChange::Overflow.into(),
            ..FileEvent::default()
        };
        if self.events.back() != Some(&overflow) {
            self.bytes += size(&overflow);
            self.events.push_back(overflow);
        }
    }

    /// The next reply; none when nothing waits.
    pub(super) fn batch(&mut self) -> Option<FileEvents> {
        let (mut events, mut bytes) = (Vec::new(), 0);
        while let Some(event) = self.events.front() {
            let more = size(event);
            let full = events.len() == BATCH_EVENTS || bytes + more > BATCH_BYTES;
            if full && !events.is_empty() {
                break;
            }
            bytes += more;
            events.extend(self.events.pop_front());
        }
        self.bytes -= bytes;
        (!events.is_empty()).then_some(FileEvents { events })
    }
}

fn size(event: &FileEvent) -> usize {
    EVENT_BYTES + event.path.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(path: Vec<u8>) -> FileEvent {
        FileEvent {
            change: FileChange::Written.into(),
            path: path.into(),
            ..FileEvent::default()
        }
    }

    fn all(queue: &mut Queue) -> Vec<FileEvent> {
        let mut all = Vec::new();
        while let Some(batch) = queue.batch() {
            let bytes: usize = batch.events.iter().map(size).sum();
            assert!(batch.events.len() <= BATCH_EVENTS && bytes <= BATCH_BYTES);
            all.extend(batch.events);
        }
        assert_eq!(queue.bytes, 0);
        all
    }

    #[test]
    fn what_does_not_fit_is_one_overflow_in_its_place() {
        let mut queue = Queue::default();
        for n in 0..EVENTS_MAX + 100 {
            queue.push(written(n.to_string().into_bytes()));
        }
        queue.overflow();
        let first = queue.batch().unwrap();
        assert_eq!(first.events.len(), BATCH_EVENTS);
        queue.push(written(b"after".to_vec()));
        let rest = all(&mut queue);
        assert_eq!(rest.len(), EVENTS_MAX - BATCH_EVENTS + 2);
        assert_eq!(rest[rest.len() - 2].change(), FileChange::Overflow);
        assert_eq!(rest[rest.len() - 1].path, "after");
    }

    #[test]
    fn long_paths_are_bounded_by_their_bytes() {
        let mut queue = Queue::default();
        for _ in 0..EVENTS_MAX {
            queue.push(written(vec![b'x'; 4000]));
        }
        assert!(queue.bytes <= BYTES_MAX + EVENT_BYTES);
        let events = all(&mut queue);
        assert_eq!(events.last().unwrap().change(), FileChange::Overflow);
        assert_eq!(events.len(), BYTES_MAX / (4000 + EVENT_BYTES) + 1);
    }
}
