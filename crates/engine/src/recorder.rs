//! Write-behind recorder of events, audit rows and transcripts: no command waits for the disk.
//!
//! Two bounded queues, each with one writer task that writes in batches. A disk that fails, is full
//! or hangs is logged once and costs history, never a run. Backpressure is bounded: a run with output
//! waits for a slot in the queue only briefly, and while the disk hangs not at all.

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

/// Capacity of the queue of events; new ones are dropped when it is full, because no caller may wait for them.
const ENTRIES_MAX: usize = 8192;

/// Capacity of the queue of output chunks (8 MiB of full ones, 32 MiB of the largest a guest can send).
const CHUNKS_MAX: usize = 64;

/// Events of one transaction.
const BATCH_MAX: usize = 256;

/// Debounce of event writes: each transaction wakes a few threads, just when commands need the CPU.
const BATCH_DELAY: Duration = Duration::from_millis(5);

/// How long output waits for a slot in the queue. Longer than a busy disk needs for a whole queue.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a reader waits for the queues to be written: after that it reads what is stored.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle to the queues of the recorder. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Recorder {
    entries: Queue<Entry>,
    output: Queue<Chunk>,
}

/// Writes a run's output to the transcript, and counts bytes that were dropped.
#[derive(Default)]
pub(crate) struct Transcriber {
    /// Deadline of the current chunk's wait for a slot.
    until: Option<Instant>,
    /// Bytes dropped since the last marker in the transcript.
    unmarked_bytes: u64,
    lost_bytes: u64,
}

/// Sending half of a bounded queue, with the writer's progress.
struct Queue<T> {
    items: mpsc::Sender<T>,
    /// Items sent so far; counted before they are sent.
    enqueued: Arc<AtomicU64>,
    written: watch::Receiver<u64>,
    /// The queue was full for the whole timeout, and nothing was written since.
    stalled: Arc<AtomicBool>,
    /// A reader waits for a flush: the writer skips its batch delay.
    flush_requested: Arc<Notify>,
}

/// Receiving half of a queue, for its writer task.
struct Consumer<T> {
    items: mpsc::Receiver<T>,
    written: watch::Sender<u64>,
    stalled: Arc<AtomicBool>,
    flush_requested: Arc<Notify>,
}

enum Entry {
    Event(NewEvent),
    Touch(SessionId, UnixMillis),
    Audit(AuditRow),
    KeyUsed(KeyId, UnixMillis),
}

struct Chunk {
    sandbox: SandboxId,
    output: Bytes,
}

/// Logs a failure once, until a write succeeds again.
#[derive(Default)]
struct LogOnce(bool);

// === impl Recorder ===

impl Recorder {
    pub(crate) fn start(store: Store) -> Self {
        let (entries, entry_work) = queue(ENTRIES_MAX);
        let (output, output_work) = queue(CHUNKS_MAX);
        tokio::spawn(write_entries(store.clone(), entry_work));
        tokio::spawn(write_output(store, output_work));
        Self { entries, output }
    }

    /// Queues an event. `detail` must be a JSON object.
    pub(crate) fn event(&self, session: &Session, kind: &'static str, detail: Value) {
        let detail = if let Value::Object(detail) = detail {
            detail
        } else {
            Map::new()
        };
        self.enqueue(Entry::Event(NewEvent {
            session: session.id.clone(),
            sandbox: session.sandbox.clone(),
            at: now_ms(),
            kind,
            detail,
        }));
    }

    /// Queues the time of a session's last use.
    pub(crate) fn touch(&self, session: &SessionId, at: UnixMillis) {
        self.enqueue(Entry::Touch(session.clone(), at));
    }

    /// Queues a row of the audit log.
    pub(crate) fn audit(&self, row: AuditRow) {
        self.enqueue(Entry::Audit(row));
    }

    /// Queues the time of an API key's last use.
    pub(crate) fn key_used(&self, key: &KeyId, at: UnixMillis) {
        self.enqueue(Entry::KeyUsed(key.clone(), at));
    }

    /// Waits until everything queued so far is written or failed, up to `FLUSH_TIMEOUT`.
    /// Needs no slot in a queue, so that a full queue does not block it.
    pub(crate) async fn flush(&self) {
        let all = async {
            self.entries.flushed().await;
            self.output.flushed().await;
        };
        if timeout(FLUSH_TIMEOUT, all).await.is_err() {
            tracing::warn!("events and transcripts wait for the disk for {FLUSH_TIMEOUT:?}");
        }
    }

    fn enqueue(&self, entry: Entry) {
        match self.entries.items.try_reserve() {
            Ok(permit) => self.entries.put(permit, entry),
            Err(TrySendError::Full(())) => {
                if self.entries.mark_stalled() {
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
    /// Queues a chunk, or drops it after `ENQUEUE_TIMEOUT`. Cancel safe: called again with the same chunk it
    /// goes on waiting, and nothing is queued until it returns.
    pub(crate) async fn write(&mut self, recorder: &Recorder, sandbox: &SandboxId, output: &Bytes) {
        let queue = &recorder.output;
        let until = *self
            .until
            .get_or_insert_with(|| Instant::now() + ENQUEUE_TIMEOUT);
        let permit = match queue.items.try_reserve() {
            Ok(permit) => Some(permit),
            Err(_) if queue.stalled.load(Ordering::Relaxed) => None,
            Err(_) => match timeout_at(until, queue.items.reserve()).await {
                Ok(permit) => permit.ok(),
                Err(_) => {
                    if queue.mark_stalled() {
                        tracing::warn!(
                            "the disk takes no transcripts: output is dropped from them"
                        );
                    }
                    None
                }
            },
        };
        self.until = None;
        let Some(permit) = permit else {
            self.unmarked_bytes += output.len() as u64;
            self.lost_bytes += output.len() as u64;
            return;
        };
        let output = match self.marker() {
            Some(marker) => Bytes::from([marker.as_bytes(), output].concat()),
            None => output.clone(),
        };
        let sandbox = sandbox.clone();
        queue.put(permit, Chunk { sandbox, output });
    }

    /// Marks missing output at the end, if the queue has a slot. Returns all dropped bytes of the run.
    pub(crate) fn finish(&mut self, recorder: &Recorder, sandbox: &SandboxId) -> u64 {
        if self.unmarked_bytes > 0
            && let Ok(permit) = recorder.output.items.try_reserve()
            && let Some(marker) = self.marker()
        {
            let chunk = Chunk {
                sandbox: sandbox.clone(),
                output: Bytes::from(marker),
            };
            recorder.output.put(permit, chunk);
        }
        self.lost_bytes
    }

    /// Marker in the transcript in place of dropped output.
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
    fn put(&self, permit: mpsc::Permit<'_, T>, item: T) {
        self.enqueued.fetch_add(1, Ordering::Relaxed);
        permit.send(item);
    }

    /// Sets the flag; true when it was not set, so that it is logged once.
    fn mark_stalled(&self) -> bool {
        !self.stalled.swap(true, Ordering::Relaxed)
    }

    /// The queue is FIFO and items are counted before they are sent: when as many are written as were
    /// counted at the call, all items sent before it are.
    async fn flushed(&self) {
        let all = self.enqueued.load(Ordering::Relaxed);
        let mut written = self.written.clone();
        self.flush_requested.notify_one();
        // A writer that is gone has nothing left to write.
        written.wait_for(|written| *written >= all).await.ok();
    }
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self {
            items: self.items.clone(),
            enqueued: Arc::clone(&self.enqueued),
            written: self.written.clone(),
            stalled: Arc::clone(&self.stalled),
            flush_requested: Arc::clone(&self.flush_requested),
        }
    }
}

fn queue<T>(items_max: usize) -> (Queue<T>, Consumer<T>) {
    let (items, to_write) = mpsc::channel(items_max);
    let (done, written) = watch::channel(0);
    let stalled = Arc::new(AtomicBool::new(false));
    let flush_requested = Arc::new(Notify::new());
    let queue = Queue {
        items,
        enqueued: Arc::default(),
        written,
        stalled: Arc::clone(&stalled),
        flush_requested: Arc::clone(&flush_requested),
    };
    let work = Consumer {
        items: to_write,
        written: done,
        stalled,
        flush_requested,
    };
    (queue, work)
}

// === impl Consumer ===

impl<T> Consumer<T> {
    fn done(&self, items: usize) {
        self.stalled.store(false, Ordering::Relaxed);
        self.written.send_modify(|written| *written += items as u64);
    }
}

// === impl LogOnce ===

impl LogOnce {
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

/// Wall-clock time in Unix milliseconds, as stored in records.
pub(crate) fn now_ms() -> UnixMillis {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

async fn write_entries(store: Store, mut work: Consumer<Entry>) {
    let mut log_once = LogOnce::default();
    let mut batch = Vec::with_capacity(BATCH_MAX);
    loop {
        let mut count = work.items.recv_many(&mut batch, BATCH_MAX).await;
        if count == 0 {
            return;
        }
        if count < BATCH_MAX {
            let _ = timeout(BATCH_DELAY, work.flush_requested.notified()).await;
            count += fill_batch(&mut work.items, &mut batch);
        }
        let (mut events, mut audit) = (Vec::new(), Vec::new());
        let (mut touched, mut keys) = (HashMap::new(), HashMap::new());
        for entry in batch.drain(..) {
            match entry {
                Entry::Event(event) => events.push(event),
                Entry::Touch(session, at) => drop(touched.insert(session, at)),
                Entry::Audit(row) => audit.push(row),
                Entry::KeyUsed(key, at) => drop(keys.insert(key, at)),
            }
        }
        if !events.is_empty() {
            log_once.check("events", store.append_events(&events).await);
        }
        if !audit.is_empty() {
            log_once.check("the audit", store.append_audit(&audit).await);
        }
        for (key, at) in keys {
            log_once.check("times of last use", store.touch_key(&key, at).await);
        }
        for (session, at) in touched {
            log_once.check("times of last use", store.touch_session(&session, at).await);
        }
        work.done(count);
    }
}

/// Adds queued entries to the batch, up to `BATCH_MAX`; returns how many.
fn fill_batch(items: &mut mpsc::Receiver<Entry>, batch: &mut Vec<Entry>) -> usize {
    let before = batch.len();
    while batch.len() < BATCH_MAX
        && let Ok(entry) = items.try_recv()
    {
        batch.push(entry);
    }
    batch.len() - before
}

async fn write_output(store: Store, mut work: Consumer<Chunk>) {
    let mut log_once = LogOnce::default();
    let mut batch = Vec::with_capacity(CHUNKS_MAX);
    loop {
        let count = work.items.recv_many(&mut batch, CHUNKS_MAX).await;
        if count == 0 {
            return;
        }
        let mut batched: Vec<(SandboxId, Vec<u8>)> = Vec::new();
        for Chunk { sandbox, output } in batch.drain(..) {
            match batched.iter_mut().find(|(other, _)| *other == sandbox) {
                Some((_, batched)) => batched.extend_from_slice(&output),
                None => batched.push((sandbox, output.to_vec())),
            }
        }
        for (sandbox, output) in batched {
            log_once.check(
                "transcripts",
                store.append_transcript(&sandbox, output).await,
            );
        }
        work.done(count);
    }
}
