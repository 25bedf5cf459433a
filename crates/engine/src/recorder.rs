//! Writes events and transcripts down behind the callers' backs, so that no command waits for the disk.
//!
//! Two bounded queues, each with one writer that takes what has gathered and writes it at once.
//! A failure to write (a full disk) is told once in the log and never fails a run.

use bytes::Bytes;
use k8e_model::{SessionId, UnixMillis};
use k8e_store::{NewEvent, Store, StoreError};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Events that may wait; over that new ones are dropped, for no caller may wait for them.
const NOTES_MAX: usize = 8192;

/// Chunks of output that may wait (8 MiB of full ones); over that the runs that write wait.
const CHUNKS_MAX: usize = 64;

/// Of one transaction.
const BATCH_MAX: usize = 256;

/// Where everybody hands in what is to be written down. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Recorder {
    notes: mpsc::Sender<Note>,
    output: mpsc::Sender<Output>,
    dropped: Arc<AtomicBool>,
}

/// A place in the queue of output, held before the output is read so that none is lost on the way.
pub(crate) struct Slot<'a>(Option<mpsc::Permit<'a, Output>>);

enum Note {
    Event(NewEvent),
    Touch(SessionId, UnixMillis),
    Flush(oneshot::Sender<()>),
}

enum Output {
    Chunk(SessionId, Bytes),
    Flush(oneshot::Sender<()>),
}

/// Says a failure once, until it worked again.
#[derive(Default)]
struct Quiet(bool);

// === impl Recorder ===

impl Recorder {
    pub(crate) fn start(store: Store) -> Self {
        let (notes, note_queue) = mpsc::channel(NOTES_MAX);
        let (output, output_queue) = mpsc::channel(CHUNKS_MAX);
        tokio::spawn(write_notes(store.clone(), note_queue));
        tokio::spawn(write_output(store, output_queue));
        Self {
            notes,
            output,
            dropped: Arc::default(),
        }
    }

    /// Hands an event in. `detail` must be a JSON object.
    pub(crate) fn event(&self, session: &SessionId, kind: &'static str, detail: Value) {
        let detail = if let Value::Object(detail) = detail {
            detail
        } else {
            Map::new()
        };
        self.note(Note::Event(NewEvent {
            session: session.clone(),
            at: now_ms(),
            kind,
            detail,
        }));
    }

    /// Hands in when a session was last used.
    pub(crate) fn touch(&self, session: &SessionId, at: UnixMillis) {
        self.note(Note::Touch(session.clone(), at));
    }

    /// Waits for a place in the queue of output. Cancel safe.
    pub(crate) async fn slot(&self) -> Slot<'_> {
        Slot(self.output.reserve().await.ok())
    }

    /// Waits until everything handed in so far is written, or failed to be.
    pub(crate) async fn flush(&self) {
        let (events_done, events) = oneshot::channel();
        let (output_done, output) = oneshot::channel();
        // A closed queue has nothing left to flush.
        if self.notes.send(Note::Flush(events_done)).await.is_ok() {
            events.await.ok();
        }
        if self.output.send(Output::Flush(output_done)).await.is_ok() {
            output.await.ok();
        }
    }

    fn note(&self, note: Note) {
        let full = self.notes.try_send(note).is_err();
        if full && !self.dropped.swap(true, Ordering::Relaxed) {
            tracing::warn!("events come faster than they can be written: some are dropped");
        } else if !full {
            self.dropped.store(false, Ordering::Relaxed);
        }
    }
}

// === impl Slot ===

impl Slot<'_> {
    pub(crate) fn write(self, session: &SessionId, output: Bytes) {
        if let Some(permit) = self.0 {
            permit.send(Output::Chunk(session.clone(), output));
        }
    }
}

// === impl Quiet ===

impl Quiet {
    fn check(&mut self, what: &str, result: Result<(), StoreError>) {
        match result {
            Ok(()) => self.0 = false,
            Err(error) if !self.0 => {
                self.0 = true;
                tracing::warn!(
                    error = crate::error::chain(&error),
                    "{what} cannot be written; runs go on without"
                );
            }
            Err(_) => {}
        }
    }
}

/// The wall clock, as records keep it.
pub(crate) fn now_ms() -> UnixMillis {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

async fn write_notes(store: Store, mut queue: mpsc::Receiver<Note>) {
    let mut quiet = Quiet::default();
    let mut batch = Vec::with_capacity(BATCH_MAX);
    while queue.recv_many(&mut batch, BATCH_MAX).await > 0 {
        let (mut events, mut touched, mut flushed) =
            (Vec::new(), std::collections::HashMap::new(), Vec::new());
        for note in batch.drain(..) {
            match note {
                Note::Event(event) => events.push(event),
                Note::Touch(session, at) => drop(touched.insert(session, at)),
                Note::Flush(done) => flushed.push(done),
            }
        }
        if !events.is_empty() {
            quiet.check("events", store.append_events(&events).await);
        }
        for (session, at) in touched {
            quiet.check("times of last use", store.touch_session(&session, at).await);
        }
        for done in flushed {
            done.send(()).ok();
        }
    }
}

async fn write_output(store: Store, mut queue: mpsc::Receiver<Output>) {
    let mut quiet = Quiet::default();
    let mut batch = Vec::with_capacity(CHUNKS_MAX);
    while queue.recv_many(&mut batch, CHUNKS_MAX).await > 0 {
        let mut chunks: Vec<(SessionId, Vec<u8>)> = Vec::new();
        let mut flushed = Vec::new();
        for output in batch.drain(..) {
            match output {
                Output::Chunk(session, data) => {
                    match chunks.iter_mut().find(|(other, _)| *other == session) {
                        Some((_, gathered)) => gathered.extend_from_slice(&data),
                        None => chunks.push((session, data.to_vec())),
                    }
                }
                Output::Flush(done) => flushed.push(done),
            }
        }
        for (session, data) in chunks {
            quiet.check("transcripts", store.append_transcript(&session, data).await);
        }
        for done in flushed {
            done.send(()).ok();
        }
    }
}
