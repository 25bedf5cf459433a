//! State of one terminal: ring buffer of recent output, attached readers, and operations.

use super::keys::{Key, Keys};
use super::open::Ours;
use crate::error::Error;
use crate::{Guest, sys};
use k8e_wire::proto::{Exited, TerminalState};
use rustix::termios::Winsize;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Size of the ring buffer, as for `sandbox.v1` clients.
const RING_BYTES: usize = 64 * 1024;

/// Limit of attached readers; each has a connection.
const READERS_MAX: usize = 16;

/// Stall timeout of a reader that reads nothing while there is output: the other readers, and the command,
/// wait for it.
const STALL_MAX: Duration = Duration::from_secs(5);

/// Timeout of input to a program that does not read.
const WRITE_WITHIN: Duration = Duration::from_secs(5);

/// Deadline for a supervisor to report the foreground process group.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// A terminal.
pub(super) struct Terminal {
    id: String,
    /// Process id of its command.
    pub(super) pid: i32,
    /// Process id of the supervisor; also the session id.
    pub(super) supervisor: i32,
    /// Path of the slave.
    path: CString,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    /// Notified when a reader advances or detaches.
    taken: Notify,
    /// Held during a write: concurrent inputs must not be interleaved.
    writing: tokio::sync::Mutex<()>,
    /// The last foreground process group that the supervisor reported.
    foreground: watch::Sender<i32>,
}

struct State {
    /// The master; none when the terminal has ended.
    master: Option<Arc<AsyncFd<OwnedFd>>>,
    size: Winsize,
    ring: VecDeque<u8>,
    /// Bytes of output in total.
    end: u64,
    readers: BTreeMap<u64, Progress>,
    next_reader: u64,
    /// Whether it has one reader, for which the command waits without a timeout.
    awaits_reader: bool,
    over: Option<(Exited, u64)>,
}

struct Progress {
    /// Position up to which it has read.
    at: u64,
    /// Time of its last progress, or of the first output that it has not read.
    since: Instant,
}

/// A client that reads a terminal.
pub(super) struct Reader<'a> {
    terminal: &'a Terminal,
    key: u64,
}

// === impl Terminal ===

impl Terminal {
    pub(super) fn new(
        id: String,
        pid: i32,
        supervisor: i32,
        size: Winsize,
        ours: Ours,
        awaits_reader: bool,
    ) -> Arc<Self> {
        let state = State {
            master: Some(Arc::new(ours.master)),
            size,
            ring: VecDeque::new(),
            end: 0,
            readers: BTreeMap::new(),
            next_reader: 0,
            awaits_reader,
            over: None,
        };
        Arc::new(Self {
            id,
            pid,
            supervisor,
            path: ours.path,
            state: Mutex::new(state),
            changed: watch::Sender::new(()),
            taken: Notify::new(),
            writing: tokio::sync::Mutex::default(),
            foreground: watch::Sender::new(0),
        })
    }

    /// Path of the slave.
    pub(super) fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }

    /// Notified of new output, and of the end.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn exited(&self) -> Option<Exited> {
        self.state().over.map(|(exited, _)| exited)
    }

    /// Time of its end on the monotonic clock, in nanoseconds.
    pub(super) fn ended_ns(&self) -> Option<u64> {
        self.state().over.map(|(_, at_ns)| at_ns)
    }

    pub(super) fn describe(&self) -> TerminalState {
        let state = self.state();
        TerminalState {
            id: self.id.clone(),
            pid: self.pid,
            rows: state.size.ws_row.into(),
            cols: state.size.ws_col.into(),
            exited: state.over.map(|(exited, _)| exited),
            ..TerminalState::default()
        }
    }

    /// The master, while it has not ended.
    pub(super) fn master(&self) -> Option<Arc<AsyncFd<OwnedFd>>> {
        self.state().master.clone()
    }

    /// Appends output to the ring buffer.
    pub(super) fn push(&self, data: &[u8]) {
        self.state().append(data, Instant::now());
        self.changed.send_replace(());
    }

    /// From now on stalled readers are cut off also where the terminal was created for one.
    pub(super) fn stop_awaiting_reader(&self) {
        self.state().awaits_reader = false;
        self.taken.notify_one();
    }

    /// Marks the terminal as ended.
    pub(super) fn finish(&self, exited: Exited, at_ns: u64) {
        let mut state = self.state();
        state.over = Some((exited, at_ns));
        state.master = None;
        drop(state);
        self.changed.send_replace(());
    }

    /// Bytes that may be read now so that no reader misses any (backpressure). Waits while that is 0;
    /// stalled readers are cut off. Cancel safe.
    pub(super) async fn room(&self) -> usize {
        loop {
            let taken = self.taken.notified();
            let stalled_at = {
                let mut state = self.state();
                match state.room(Instant::now()) {
                    Ok(room) => return room,
                    Err(stalled_at) => stalled_at,
                }
            };
            let _ = tokio::time::timeout_at(stalled_at, taken).await;
        }
    }

    /// Writes input; returns the number of bytes that were taken before its end or the timeout.
    pub(super) async fn write(&self, guest: &Guest, data: &[u8]) -> usize {
        let until = Instant::now() + WRITE_WITHIN;
        let Ok(_turn) = tokio::time::timeout_at(until, self.writing.lock()).await else {
            return 0;
        };
        let mut written = 0;
        while written < data.len() {
            let Some(master) = self.master() else { break };
            let rest = &data[written..];
            let key = Keys::of(&*master).and_then(|keys| keys.first(rest));
            if let Some(key) = key.filter(|key| key.at == 0) {
                // Each signal character may wait for a supervisor, and there may be thousands.
                if Instant::now() >= until {
                    break;
                }
                self.press(guest, key).await;
                written += 1;
                continue;
            }
            let plain = &rest[..key.map_or(rest.len(), |key| key.at)];
            let Ok(Ok(mut ready)) = tokio::time::timeout_at(until, master.writable()).await else {
                break;
            };
            match ready.try_io(|fd| Ok(rustix::io::write(fd, plain)?)) {
                Ok(Ok(0) | Err(_)) => break,
                Ok(Ok(more)) => written += more,
                Err(_) => {}
            }
        }
        written
    }

    /// Handles a signal character.
    async fn press(&self, guest: &Guest, key: Key) {
        if let Some(shown) = key.shown {
            // The echo is dropped if it would overrun a reader.
            let fits = self.state().fits(shown.len(), Instant::now());
            if fits {
                self.push(&shown);
            }
        }
        if let Some(group) = self.ask_foreground(guest).await {
            sys::kill(-group, key.signal);
        }
    }

    pub(super) async fn resize(&self, guest: &Guest, size: Winsize) -> Result<(), Error> {
        let Some(master) = self.master() else {
            let what = format!("terminal {:?} has ended", self.id);
            return Err(Error::Precondition(what));
        };
        rustix::termios::tcsetwinsize(&master, size)
            .map_err(Error::os("resize terminal", self.id.as_bytes()))?;
        self.state().size = size;
        // Linux has sent SIGWINCH to the foreground group; gVisor, without TIOCGPGRP here, has not.
        if rustix::termios::tcgetpgrp(&master).is_err()
            && let Some(group) = self.ask_foreground(guest).await
        {
            sys::kill(-group, libc::SIGWINCH);
        }
        Ok(())
    }

    /// The foreground process group, if there is one and the kernel or the supervisor reports it.
    pub(super) async fn foreground(&self, guest: &Guest) -> Option<i32> {
        let master = self.master()?;
        match rustix::termios::tcgetpgrp(&master) {
            Ok(group) => Some(group.as_raw_nonzero().get()),
            Err(_) => self.ask_foreground(guest).await,
        }
    }

    /// Stores the foreground process group that the supervisor reported.
    pub(super) fn set_foreground(&self, group: i32) {
        self.foreground.send_replace(group);
    }

    async fn ask_foreground(&self, guest: &Guest) -> Option<i32> {
        let mut answers = self.foreground.subscribe();
        // While it is not reaped its process id cannot be reused.
        if !guest.supervisors.contains(self.supervisor) {
            return None;
        }
        sys::kill(self.supervisor, libc::SIGUSR1);
        tokio::time::timeout(ANSWER_WITHIN, answers.changed())
            .await
            .ok()?
            .ok()?;
        let group = *answers.borrow();
        // The report is not trusted: root in the sandbox can forge it.
        (group > 1).then_some(group)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn append(&mut self, data: &[u8], now: Instant) {
        // A reader that had nothing to read did not stall.
        let end = self.end;
        for reader in self.readers.values_mut().filter(|reader| reader.at == end) {
            reader.since = now;
        }
        self.ring.extend(data);
        let surplus = self.ring.len().saturating_sub(RING_BYTES);
        self.ring.drain(..surplus);
        self.end += data.len() as u64;
    }

    /// Bytes that may be read, or the time until which to wait for the readers.
    fn room(&mut self, now: Instant) -> Result<usize, Instant> {
        loop {
            let Some((key, slowest)) = self.readers.iter().min_by_key(|(_, reader)| reader.at)
            else {
                return if self.awaits_reader && self.next_reader == 0 {
                    Err(now + STALL_MAX)
                } else {
                    Ok(RING_BYTES)
                };
            };
            let unread = usize::try_from(self.end - slowest.at).unwrap_or(usize::MAX);
            if unread < RING_BYTES {
                return Ok(RING_BYTES - unread);
            }
            if self.awaits_reader {
                return Err(now + STALL_MAX);
            }
            let stalled_at = slowest.since + STALL_MAX;
            if now < stalled_at {
                return Err(stalled_at);
            }
            let key = *key;
            self.readers.remove(&key);
        }
    }

    /// Whether so many bytes fit without a reader missing any.
    fn fits(&mut self, bytes: usize, now: Instant) -> bool {
        self.room(now).is_ok_and(|room| room >= bytes)
    }

    /// Position of the first byte in the ring buffer.
    fn begin(&self) -> u64 {
        self.end - self.ring.len() as u64
    }
}

// === impl Reader ===

impl<'a> Reader<'a> {
    pub(super) fn add(terminal: &'a Terminal) -> Result<Self, Error> {
        let mut state = terminal.state();
        if state.readers.len() >= READERS_MAX {
            return Err(Error::Exhausted(format!(
                "terminal {:?} has {READERS_MAX} readers, the maximum: detach one",
                terminal.id
            )));
        }
        let key = state.next_reader;
        state.next_reader += 1;
        let progress = Progress {
            at: state.begin(),
            since: Instant::now(),
        };
        state.readers.insert(key, progress);
        drop(state);
        terminal.taken.notify_one();
        Ok(Self { terminal, key })
    }

    /// Unread output, if any. An error when the reader was cut off.
    pub(super) fn next(&self, bytes_max: usize) -> Result<Option<Vec<u8>>, Error> {
        let state = self.terminal.state();
        let Some(progress) = state.readers.get(&self.key) else {
            return Err(Error::Exhausted(format!(
                "terminal {:?} was read too slowly: attach again",
                self.terminal.id
            )));
        };
        let skip = usize::try_from(progress.at - state.begin()).unwrap_or(usize::MAX);
        let rest = state.ring.iter().skip(skip).take(bytes_max);
        let data: Vec<u8> = rest.copied().collect();
        Ok((!data.is_empty()).then_some(data))
    }

    /// Advances its position.
    pub(super) fn took(&self, bytes: usize) {
        let mut state = self.terminal.state();
        if let Some(progress) = state.readers.get_mut(&self.key) {
            progress.at += bytes as u64;
            progress.since = Instant::now();
        }
        drop(state);
        self.terminal.taken.notify_one();
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.terminal.state().readers.remove(&self.key);
        self.terminal.taken.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(end: u64, readers: &[(u64, Instant)]) -> State {
        let readers = readers.iter().enumerate();
        State {
            master: None,
            size: crate::pty::open::size(0, 0).unwrap(),
            ring: VecDeque::from(vec![0; RING_BYTES]),
            end,
            readers: readers
                .map(|(key, (at, since))| {
                    let (at, since) = (*at, *since);
                    (key as u64, Progress { at, since })
                })
                .collect(),
            next_reader: 0,
            awaits_reader: false,
            over: None,
        }
    }

    #[test]
    fn a_reader_that_is_awaited_is_waited_for() {
        let (now, full) = (Instant::now(), RING_BYTES as u64);
        let mut none_yet = state(0, &[]);
        none_yet.awaits_reader = true;
        assert!(none_yet.room(now).is_err());
        none_yet.next_reader = 1;
        assert_eq!(none_yet.room(now), Ok(RING_BYTES));
        let mut slow = state(full, &[(0, now)]);
        slow.awaits_reader = true;
        assert!(slow.room(now + 2 * STALL_MAX).is_err());
        assert_eq!(slow.readers.len(), 1);
    }

    #[test]
    fn the_slowest_reader_sets_the_pace_until_it_stalls() {
        let (now, full) = (Instant::now(), RING_BYTES as u64);
        assert_eq!(state(full, &[]).room(now), Ok(RING_BYTES));
        assert_eq!(
            state(full, &[(full, now), (full - 100, now)]).room(now),
            Ok(RING_BYTES - 100)
        );
        let late = now + STALL_MAX;
        let mut stuck = state(full, &[(full, now), (0, now)]);
        assert_eq!(stuck.room(now), Err(late));
        assert!(!stuck.fits(2, now));
        assert!(!state(full, &[(1, now)]).fits(2, now));
        assert!(state(full, &[(2, now)]).fits(2, now));
        assert_eq!(stuck.room(late), Ok(RING_BYTES));
        assert_eq!(stuck.readers.len(), 1);
    }

    #[test]
    fn a_reader_that_had_nothing_to_read_did_not_stall() {
        let (idle_since, full) = (Instant::now(), RING_BYTES as u64);
        let now = idle_since + 2 * STALL_MAX;
        let mut idle = state(full, &[(full, idle_since)]);
        idle.append(&[0; RING_BYTES], now);
        assert_eq!(idle.room(now), Err(now + STALL_MAX));
        assert_eq!(idle.readers.len(), 1);
        // One that has unread output is not given more time by more of it.
        let mut slow = state(full, &[(full - 1, idle_since)]);
        slow.append(&[0; RING_BYTES - 1], now);
        assert_eq!(slow.room(now), Ok(RING_BYTES));
        assert!(slow.readers.is_empty());
    }
}
