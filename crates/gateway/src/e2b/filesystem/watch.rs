//! `WatchDir`, a stream of changes in a directory, and the watcher that is polled (`CreateWatcher`, `GetWatcherEvents`,
//! `RemoveWatcher`), which E2B's synchronous Python client uses.
//!
//! A polled watcher belongs to its sandbox and is bounded: while its events are not fetched, the guest is not read, and
//! reports an overflow when its own queue is full. E2B has no event for that, so it is an error.

use super::{Error, Fs, entry};
use crate::e2b::body::{Answer, BoxError, Upload};
use crate::e2b::connect::{self, Rpc, end, frame};
use crate::e2b::error::is_gone;
use bytes::Bytes;
use futures::FutureExt as _;
use k8e_engine::{FileChange, FileEvent, FileInfo, FileKind, FileWatch, Sessions};
use k8e_model::{GuestPath, Principal, SessionId};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

/// Polled watchers of one sandbox, and of all: each keeps events in the server's memory.
const WATCHERS_PER_SANDBOX_MAX: usize = 8;
const WATCHERS_MAX: usize = 1024;

/// Events of a polled watcher that are kept, and their bytes; more stay with the guest until these are fetched.
const EVENTS_MAX: usize = 4096;
const BYTES_MAX: usize = 256 * 1024;

/// Bytes of an event beside its name; with the description of its file.
const EVENT_BYTES: usize = 128;
const ENTRY_BYTES: usize = 1024;

/// A watcher that is not polled for this long is removed: its client is gone.
const UNPOLLED_MAX: Duration = Duration::from_secs(60 * 60);

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WatchRequest {
    #[serde(default)]
    path: String,
    #[serde(default)]
    recursive: bool,
    #[serde(default, alias = "include_entry")]
    include_entry: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WatcherRequest {
    #[serde(default, alias = "watcher_id")]
    watcher_id: String,
}

/// A watched directory, with what is needed to describe its files.
struct Watch {
    sessions: Sessions,
    who: Principal,
    id: SessionId,
    /// Absolute path.
    dir: Vec<u8>,
    include_entry: bool,
    watch: FileWatch,
}

/// The polled watchers of all sandboxes.
#[derive(Clone, Default)]
pub(in crate::e2b) struct Watchers(Arc<Registry>);

#[derive(Default)]
struct Registry {
    last_id: AtomicU64,
    watchers: Mutex<HashMap<(SessionId, String), Arc<Watcher>>>,
}

struct Watcher {
    state: Mutex<State>,
    /// Events were fetched, so there is room.
    fetched: Notify,
    task: Mutex<Option<AbortHandle>>,
}

struct State {
    events: Vec<Value>,
    bytes: usize,
    /// Why it ended; reported after the events.
    failed: Option<Error>,
    polled: Instant,
}

/// Answers `WatchDir`.
pub(super) async fn stream(fs: Result<Fs<'_>, Error>, rpc: Rpc, upload: Upload) -> Answer {
    let started = match fs {
        Ok(fs) => Watch::start(&fs, rpc, upload).await,
        Err(error) => Err(error),
    };
    let watch = match started {
        Ok(watch) => watch,
        Err(error) => return connect::failed_stream(&error),
    };
    let frames = Frames {
        watch,
        keepalive: rpc.keepalive,
        deadline: rpc.timeout.map(|timeout| Instant::now() + timeout),
        ready: VecDeque::from([frame(&json!({ "start": {} }))]),
        over: false,
    };
    connect::stream(futures::stream::unfold(frames, |mut frames| async move {
        let frame = frames.next().await?;
        Some((Ok::<_, BoxError>(frame), frames))
    }))
}

/// Answers `CreateWatcher`.
pub(super) async fn create(fs: &Fs<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let watch = Watch::start(fs, rpc, upload).await?;
    let id = fs.call.api.watchers.add(watch)?;
    Ok(json!({ "watcherId": id }))
}

/// Answers `GetWatcherEvents`.
pub(super) async fn events(fs: &Fs<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let request: WatcherRequest = rpc.message(upload).await?;
    let call = fs.call;
    let watcher = call.api.watchers.find(&call.id, &request.watcher_id)?;
    Ok(json!({ "events": watcher.fetch()? }))
}

/// Answers `RemoveWatcher`.
pub(super) async fn remove(fs: &Fs<'_>, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
    let request: WatcherRequest = rpc.message(upload).await?;
    let call = fs.call;
    let watchers = &call.api.watchers;
    let watcher = watchers.find(&call.id, &request.watcher_id)?;
    watchers.remove(&call.id, &request.watcher_id);
    if let Some(task) = watcher.task().take() {
        task.abort();
    }
    Ok(json!({}))
}

// === impl Watch ===

impl Watch {
    async fn start(fs: &Fs<'_>, rpc: Rpc, upload: Upload) -> Result<Self, Error> {
        let request: WatchRequest = rpc.message(upload).await?;
        let path = fs.path(&request.path)?;
        let call = fs.call;
        let watch = call
            .api
            .sessions
            .watch_files(&call.who, &call.id, &path, request.recursive);
        Ok(Self {
            watch: watch.await.map_err(|error| fs.failed(&error))?,
            sessions: call.api.sessions.clone(),
            who: call.who.clone(),
            id: call.id.clone(),
            dir: [b"/", path.as_bytes()].concat(),
            include_entry: request.include_entry,
        })
    }

    /// The next events, as E2B describes them, and then maybe an error. Cancel safe but for descriptions of files.
    async fn next(&mut self) -> (Vec<Value>, Option<Error>) {
        let events = match self.watch.next().await {
            Ok(events) => events,
            Err(error) => return (Vec::new(), Some(failed(&error))),
        };
        let mut described = Vec::with_capacity(events.len());
        for event in events {
            match kind(event.change) {
                Some(kind) => described.push(self.described(&event, kind).await),
                None => return (described, Some(lost())),
            }
        }
        (described, None)
    }

    async fn described(&self, event: &FileEvent, kind: &str) -> Value {
        let name = String::from_utf8_lossy(&event.path);
        let mut described = json!({ "name": name, "type": kind });
        let exists = !matches!(
            event.change,
            FileChange::Removed | FileChange::RenamedFrom | FileChange::Overflow
        );
        if self.include_entry
            && exists
            && let Some(entry) = self.entry(&event.path).await
        {
            described["entry"] = entry;
        }
        described
    }

    /// Describes the file of an event; none when it is gone meanwhile.
    async fn entry(&self, name: &[u8]) -> Option<Value> {
        let path = GuestPath::parse_absolute(&[&self.dir[..], name].join(&b'/')).ok()?;
        let (who, id) = (&self.who, &self.id);
        let info: FileInfo = self.sessions.stat(who, id, &path).await.ok()?;
        let target = match info.kind {
            FileKind::Symlink => self.sessions.stat_target(who, id, &path).await.ok(),
            FileKind::File | FileKind::Directory | FileKind::Other => None,
        };
        Some(entry(&info, target.as_ref()))
    }
}

/// Messages of a `WatchDir` stream.
struct Frames {
    watch: Watch,
    keepalive: Duration,
    deadline: Option<Instant>,
    ready: VecDeque<Bytes>,
    over: bool,
}

// === impl Frames ===

impl Frames {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(frame) = self.ready.pop_front() {
            return Some(frame);
        }
        if self.over {
            return None;
        }
        let deadline = self.deadline;
        let reached = async {
            match deadline {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let (events, failed) = tokio::select! {
            next = self.watch.next() => next,
            () = sleep(self.keepalive) => return Some(frame(&json!({ "keepalive": {} }))),
            () = reached => {
                let message = "the timeout of the watch is reached";
                (Vec::new(), Some(Error::new("deadline_exceeded", message)))
            }
        };
        let events = events.iter();
        self.ready
            .extend(events.map(|event| frame(&json!({ "filesystem": event }))));
        if let Some(error) = failed {
            self.over = true;
            self.ready.push_back(end(Some(&error)));
        }
        self.ready.pop_front()
    }
}

// === impl Watchers ===

impl Watchers {
    fn add(&self, watch: Watch) -> Result<String, Error> {
        let id = format!("w{}", self.0.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        let (session, watcher) = (watch.id.clone(), Arc::new(Watcher::new()));
        {
            let mut all = self.all();
            let own = all.keys().filter(|(of, _)| *of == session).count();
            if own >= WATCHERS_PER_SANDBOX_MAX || all.len() >= WATCHERS_MAX {
                let message = format!(
                    "too many watchers, at most {WATCHERS_PER_SANDBOX_MAX} for a sandbox: stop some"
                );
                return Err(Error::new("resource_exhausted", message));
            }
            all.insert((session.clone(), id.clone()), Arc::clone(&watcher));
        }
        let task = tokio::spawn(follow(
            self.clone(),
            (session, id.clone()),
            Arc::clone(&watcher),
            watch,
        ));
        *watcher.task() = Some(task.abort_handle());
        Ok(id)
    }

    fn find(&self, session: &SessionId, id: &str) -> Result<Arc<Watcher>, Error> {
        let key = (session.clone(), id.to_owned());
        let found = self.all().get(&key).map(Arc::clone);
        found.ok_or_else(|| Error::new("not_found", "no such watcher: create it again"))
    }

    fn remove(&self, session: &SessionId, id: &str) {
        self.all().remove(&(session.clone(), id.to_owned()));
    }

    fn all(&self) -> MutexGuard<'_, HashMap<(SessionId, String), Arc<Watcher>>> {
        let all = self.0.watchers.lock();
        all.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Task of a polled watcher: fetches its events, until the sandbox ends or nobody polls.
async fn follow(watchers: Watchers, key: (SessionId, String), watcher: Arc<Watcher>, watch: Watch) {
    let unpolled = watcher.unpolled().shared();
    let filled = tokio::select! {
        error = watcher.fill(watch) => Some(error),
        () = unpolled.clone() => None,
    };
    if let Some(error) = filled
        && !error.is_gone()
    {
        watcher.state().failed = Some(error);
        unpolled.await;
    }
    watchers.remove(&key.0, &key.1);
}

// === impl Watcher ===

impl Watcher {
    fn new() -> Self {
        Self {
            state: Mutex::new(State {
                events: Vec::new(),
                bytes: 0,
                failed: None,
                polled: Instant::now(),
            }),
            fetched: Notify::new(),
            task: Mutex::default(),
        }
    }

    /// Takes events as long as there is room for them. Returns why there are no more.
    async fn fill(&self, mut watch: Watch) -> Error {
        let event_bytes = match watch.include_entry {
            true => EVENT_BYTES + ENTRY_BYTES,
            false => EVENT_BYTES,
        };
        loop {
            while self.state().is_full() {
                self.fetched.notified().await;
            }
            let (events, failed) = watch.next().await;
            let size = |event: &Value| event_bytes + event["name"].as_str().map_or(0, str::len);
            let mut state = self.state();
            state.bytes += events.iter().map(size).sum::<usize>();
            state.events.extend(events);
            if let Some(error) = failed {
                return error;
            }
        }
    }

    /// The events since the last time; the reason of the end when there are none.
    fn fetch(&self) -> Result<Vec<Value>, Error> {
        let mut state = self.state();
        state.polled = Instant::now();
        state.bytes = 0;
        let events = std::mem::take(&mut state.events);
        self.fetched.notify_one();
        match &state.failed {
            Some(error) if events.is_empty() => Err(error.clone()),
            _ => Ok(events),
        }
    }

    /// Resolves when it was not polled for [`UNPOLLED_MAX`].
    async fn unpolled(&self) {
        loop {
            let polled = self.state().polled;
            sleep_until(polled + UNPOLLED_MAX).await;
            if self.state().polled == polled {
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn task(&self) -> MutexGuard<'_, Option<AbortHandle>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn is_full(&self) -> bool {
        self.events.len() >= EVENTS_MAX || self.bytes >= BYTES_MAX
    }
}

/// E2B's name of a change. A rename is two: the old name, and the new one as if it was made. None for an overflow.
fn kind(change: FileChange) -> Option<&'static str> {
    match change {
        FileChange::Created | FileChange::RenamedTo => Some("EVENT_TYPE_CREATE"),
        FileChange::Written => Some("EVENT_TYPE_WRITE"),
        FileChange::Removed => Some("EVENT_TYPE_REMOVE"),
        FileChange::RenamedFrom => Some("EVENT_TYPE_RENAME"),
        FileChange::Attributes => Some("EVENT_TYPE_CHMOD"),
        FileChange::Overflow => None,
    }
}

fn lost() -> Error {
    let message = "events were lost because they came too fast: list the directory and watch again";
    Error::new("data_loss", message)
}

fn failed(error: &k8e_engine::Error) -> Error {
    match is_gone(error) {
        true => Error::gone(),
        false => Error::of(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn events_come_before_the_reason_of_the_end() {
        let watcher = Watcher::new();
        watcher.state().events = vec![json!({ "name": "a" })];
        watcher.state().failed = Some(lost());
        assert_eq!(watcher.fetch().unwrap().len(), 1);
        assert_eq!(watcher.fetch().unwrap_err().code, "data_loss");
        assert_eq!(watcher.fetch().unwrap_err().code, "data_loss");
    }

    #[test]
    fn requests_are_read_in_both_spellings() {
        for text in [
            r#"{"path":"a","recursive":true,"includeEntry":true,"allowNetworkMounts":false}"#,
            r#"{"path":"a","recursive":true,"include_entry":true}"#,
        ] {
            let request: WatchRequest = serde_json::from_str(text).unwrap();
            assert!(request.recursive && request.include_entry, "{text}");
        }
        let request: WatcherRequest = serde_json::from_str(r#"{"watcher_id":"w1"}"#).unwrap();
        assert_eq!(request.watcher_id, "w1");
    }
}
