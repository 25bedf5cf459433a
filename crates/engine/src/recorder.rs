//! Writes events, the audit and transcripts down behind the callers' backs, so that no command waits for the disk.
//!
//! Two bounded queues, each with one writer that takes what has gathered and writes it at once.
//! A disk that fails, is full or hangs is told once in the log and costs history, never a run: who
//! has output to write down waits for a place only briefly, and while the disk hangs not at all.

use bytes::Bytes;
use k8e_model::{KeyId, SandboxId, Session, SessionId, UnixMillis};
use k8e_store::{AuditRow, NewEvent, Store, StoreError};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

/// Events that may wait; over that new ones are dropped, for no caller may wait for them.
const NOTES_MAX: usize = 8192;

/// Chunks of output that may wait (8 MiB of full ones, 32 MiB of the largest a guest can send).
const CHUNKS_MAX: usize = 64;

/// Of one transaction.
const BATCH_MAX: usize = 256;

/// How long events gather. Each transaction wakes a few threads, just when commands need the CPU.
const GATHER: Duration = Duration::from_millis(5);

/// How long output waits for a place in the queue. Longer than a busy disk needs for a whole queue.
const PLACE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a reader waits for what is still in the queues: after that it reads what is there.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Where everybody hands in what is to be written down. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Recorder {
    notes: Queue<Note>,
    output: Queue<Chunk>,
}

/// What is written of a run's output, and what could not be.
#[derive(Default)]
pub(crate) struct Transcriber {
    /// Until when the chunk at hand may wait.
    until: Option<Instant>,
    /// Not written since the last marker.
    unmarked_bytes: u64,
    lost_bytes: u64,
}

/// A queue to a writer, which says how far it is.
struct Queue<T> {
    items: mpsc::Sender<T>,
    /// Counted before they are put in.
    handed_in: Arc<AtomicU64>,
    written: watch::Receiver<u64>,
    /// Something found no place in time, and nothing was written since.
    stuck: Arc<AtomicBool>,
    /// Somebody waits for what was handed in.
    hurry: Arc<Notify>,
}

/// The writer's end of a queue.
struct Work<T> {
    items: mpsc::Receiver<T>,
    written: watch::Sender<u64>,
    stuck: Arc<AtomicBool>,
    hurry: Arc<Notify>,
}

enum Note {
    Event(NewEvent),
    Touch(SessionId, UnixMillis),
    Audit(AuditRow),
    KeyUsed(KeyId, UnixMillis),
}

struct Chunk {
    sandbox: SandboxId,
    output: Bytes,
}

/// Says a failure once, until it worked again.
#[derive(Default)]
struct Quiet(bool);

// === impl Recorder ===

impl Recorder {
    pub(crate) fn start(store: Store) -> Self {
        let (notes, note_work) = queue(NOTES_MAX);
        let (output, output_work) = queue(CHUNKS_MAX);
        tokio::spawn(write_notes(store.clone(), note_work));
        tokio::spawn(write_output(store, output_work));
        Self { notes, output }
    }

    /// Hands an event in. `detail` must be a JSON object.
    pub(crate) fn event(&self, session: &Session, kind: &'static str, detail: Value) {
        let detail = if let Value::Object(detail) = detail {
            detail
        } else {
            Map::new()
        };
        self.note(Note::Event(NewEvent {
            session: session.id.clone(),
            sandbox: session.sandbox.clone(),
            at: now_ms(),
            kind,
            detail,
        }));
    }

    /// Hands in when a session was last used.
    pub(crate) fn touch(&self, session: &SessionId, at: UnixMillis) {
        self.note(Note::Touch(session.clone(), at));
    }

    /// Hands in a row of the audit.
    pub(crate) fn audit(&self, row: AuditRow) {
        self.note(Note::Audit(row));
    }

    /// Hands in when an API key was last used.
    pub(crate) fn key_used(&self, key: &KeyId, at: UnixMillis) {
        self.note(Note::KeyUsed(key.clone(), at));
    }

    /// Waits until everything handed in so far is written, or failed to be; for a bounded time.
    /// Takes no place in a queue, so that no queue can hold it up.
    pub(crate) async fn flush(&self) {
        let all = async {
            self.notes.flushed().await;
            self.output.flushed().await;
        };
        if timeout(FLUSH_TIMEOUT, all).await.is_err() {
            tracing::warn!("events and transcripts wait for the disk for {FLUSH_TIMEOUT:?}");
        }
    }

    fn note(&self, note: Note) {
        match self.notes.items.try_reserve() {
            Ok(place) => self.notes.put(place, note),
            Err(TrySendError::Full(())) => {
                if self.notes.now_stuck() {
                    tracing::warn!("events come faster than they can be written: some are dropped");
                }
            }
            // The server has stopped, and its writer with it.
            Err(TrySendError::Closed(())) => {}
        }
    }
}

// === impl Transcriber ===

impl Transcriber {
    /// Writes a chunk down, or gives it up. Cancel safe: called again with the same chunk it goes
    /// on where it was, and it has written nothing until it returns.
    pub(crate) async fn write(&mut self, recorder: &Recorder, sandbox: &SandboxId, output: &Bytes) {
        let queue = &recorder.output;
        let until = *self
            .until
            .get_or_insert_with(|| Instant::now() + PLACE_TIMEOUT);
        let place = match queue.items.try_reserve() {
            Ok(place) => Some(place),
            Err(_) if queue.stuck.load(Ordering::Relaxed) => None,
            Err(_) => match timeout_at(until, queue.items.reserve()).await {
                Ok(place) => place.ok(),
                Err(_) => {
                    if queue.now_stuck() {
                        tracing::warn!("the disk takes no transcripts: output is not written down");
                    }
                    None
                }
            },
        };
        self.until = None;
        let Some(place) = place else {
            self.unmarked_bytes += output.len() as u64;
            self.lost_bytes += output.len() as u64;
            return;
        };
        let output = match self.marker() {
            Some(marker) => Bytes::from([marker.as_bytes(), output].concat()),
            None => output.clone(),
        };
        let sandbox = sandbox.clone();
        queue.put(place, Chunk { sandbox, output });
    }

    /// Says what is missing at the end, if it can. Returns how many bytes were not written in all.
    pub(crate) fn finish(&mut self, recorder: &Recorder, sandbox: &SandboxId) -> u64 {
        if self.unmarked_bytes > 0
            && let Ok(place) = recorder.output.items.try_reserve()
            && let Some(marker) = self.marker()
        {
            let chunk = Chunk {
                sandbox: sandbox.clone(),
                output: Bytes::from(marker),
            };
            recorder.output.put(place, chunk);
        }
        self.lost_bytes
    }

    /// What stands in the transcript in place of what is not in it.
    fn marker(&mut self) -> Option<String> {
        match std::mem::take(&mut self.unmarked_bytes) {
            0 => None,
            bytes => Some(format!(
                "\n[k8e: {bytes} bytes of output are missing here: the disk was too slow]\n"
            )),
        }
    }
}

// === impl Queue ===

impl<T> Queue<T> {
    fn put(&self, place: mpsc::Permit<'_, T>, item: T) {
        self.handed_in.fetch_add(1, Ordering::Relaxed);
        place.send(item);
    }

    /// Whether that is news.
    fn now_stuck(&self) -> bool {
        !self.stuck.swap(true, Ordering::Relaxed)
    }

    /// What was put in before this call comes out before what was put in after, and each was
    /// counted before: when as many are out as were counted, all of them are.
    async fn flushed(&self) {
        let all = self.handed_in.load(Ordering::Relaxed);
        let mut written = self.written.clone();
        self.hurry.notify_one();
        // A writer that is gone has nothing left to write.
        written.wait_for(|written| *written >= all).await.ok();
    }
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self {
            items: self.items.clone(),
            handed_in: Arc::clone(&self.handed_in),
            written: self.written.clone(),
            stuck: Arc::clone(&self.stuck),
            hurry: Arc::clone(&self.hurry),
        }
    }
}

fn queue<T>(items_max: usize) -> (Queue<T>, Work<T>) {
    let (items, to_write) = mpsc::channel(items_max);
    let (done, written) = watch::channel(0);
    let stuck = Arc::new(AtomicBool::new(false));
    let hurry = Arc::new(Notify::new());
    let queue = Queue {
        items,
        handed_in: Arc::default(),
        written,
        stuck: Arc::clone(&stuck),
        hurry: Arc::clone(&hurry),
    };
    let work = Work {
        items: to_write,
        written: done,
        stuck,
        hurry,
    };
    (queue, work)
}

// === impl Work ===

impl<T> Work<T> {
    fn done(&self, items: usize) {
        self.stuck.store(false, Ordering::Relaxed);
        self.written.send_modify(|written| *written += items as u64);
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

async fn write_notes(store: Store, mut work: Work<Note>) {
    let mut quiet = Quiet::default();
    let mut batch = Vec::with_capacity(BATCH_MAX);
    loop {
        let mut count = work.items.recv_many(&mut batch, BATCH_MAX).await;
        if count == 0 {
            return;
        }
        if count < BATCH_MAX {
            let _ = timeout(GATHER, work.hurry.notified()).await;
            count += gathered(&mut work.items, &mut batch);
        }
        let (mut events, mut audit) = (Vec::new(), Vec::new());
        let (mut touched, mut keys) = (HashMap::new(), HashMap::new());
        for note in batch.drain(..) {
            match note {
                Note::Event(event) => events.push(event),
                Note::Touch(session, at) => drop(touched.insert(session, at)),
                Note::Audit(row) => audit.push(row),
                Note::KeyUsed(key, at) => drop(keys.insert(key, at)),
            }
        }
        if !events.is_empty() {
            quiet.check("events", store.append_events(&events).await);
        }
        if !audit.is_empty() {
            quiet.check("the audit", store.append_audit(&audit).await);
        }
        for (key, at) in keys {
            quiet.check("times of last use", store.touch_key(&key, at).await);
        }
        for (session, at) in touched {
            quiet.check("times of last use", store.touch_session(&session, at).await);
        }
        work.done(count);
    }
}

/// Adds what came meanwhile.
fn gathered(items: &mut mpsc::Receiver<Note>, batch: &mut Vec<Note>) -> usize {
    let before = batch.len();
    while batch.len() < BATCH_MAX
        && let Ok(note) = items.try_recv()
    {
        batch.push(note);
    }
    batch.len() - before
}

async fn write_output(store: Store, mut work: Work<Chunk>) {
    let mut quiet = Quiet::default();
    let mut batch = Vec::with_capacity(CHUNKS_MAX);
    loop {
        let count = work.items.recv_many(&mut batch, CHUNKS_MAX).await;
        if count == 0 {
            return;
        }
        let mut gathered: Vec<(SandboxId, Vec<u8>)> = Vec::new();
        for Chunk { sandbox, output } in batch.drain(..) {
            match gathered.iter_mut().find(|(other, _)| *other == sandbox) {
                Some((_, gathered)) => gathered.extend_from_slice(&output),
                None => gathered.push((sandbox, output.to_vec())),
            }
        }
        for (sandbox, output) in gathered {
            quiet.check(
                "transcripts",
                store.append_transcript(&sandbox, output).await,
            );
        }
        work.done(count);
    }
}
