//! Terminals: commands on a pseudo-terminal (PTY) that outlive the call that created them.
//!
//! The sandbox's guest holds the terminals, their scrollback and their foreground process groups. The server holds
//! only their owners, also in the store, so that a restart ends none. What a guest reports about its
//! terminals is not trusted beyond its own session.
//!
//! Input and output are in no transcript: passwords are typed into terminals. A terminal without
//! an attached client does not hold off its session's idle timeout.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

mod create;
mod stream;

pub use create::TerminalRequest;
pub use stream::{TerminalEvent, TerminalStream};

use crate::guest::Call;
use crate::live::{Live, Purpose};
use crate::sessions::Shared;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Code, Principal, SessionId, TerminalId, UnixMillis};
use k8e_store::TerminalRecord;
use k8e_wire::CHUNK_BYTES;
use k8e_wire::proto::{
    self, EndTerminal, InspectTerminal, ListTerminals, ResizeTerminal, SignalTerminal, Waiting,
    WriteTerminal, reply, request,
};
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Terminals per session: the limit of the Go K8E, and of a guest.
const PER_SESSION_MAX: usize = 64;

/// Highest signal number of Linux.
const SIGNAL_MAX: i32 = 64;

/// Default grace period between SIGTERM and SIGKILL at the end of a terminal (when the request sets none).
const GRACE_DEFAULT: Duration = Duration::from_secs(1);

/// Status of a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminalView {
    /// Random identifier.
    pub id: TerminalId,
    /// Session that it belongs to.
    pub session: SessionId,
    /// Process id of its command inside the sandbox.
    pub pid: i32,
    /// The name of its program, for people.
    pub program: String,
    /// Height in characters.
    pub rows: u32,
    /// Width in characters.
    pub cols: u32,
    /// Creation time.
    pub created_at: UnixMillis,
    /// Exit of its command; none while it runs.
    pub exited: Option<TerminalExit>,
}

/// Exit of a terminal's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalExit {
    /// 0 to 255; 128+n when signal n killed it.
    pub exit_code: i32,
    /// Signal that killed it; 0 when it exited by itself.
    pub signal: i32,
}

/// Foreground process group of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreground {
    /// Process group id; 0 when there is none.
    pub group: i32,
    /// Whether it blocks on terminal input; none when unknown.
    pub input_waiting: Option<bool>,
}

/// Registry of terminals and their sessions.
#[derive(Default)]
pub(crate) struct Terminals(Mutex<HashMap<TerminalId, Entry>>);

#[derive(Clone)]
struct Entry {
    live: Arc<Live>,
    record: TerminalRecord,
}

// === impl Sessions ===

impl Sessions {
    /// Writes input to a terminal.
    pub async fn write_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        mut data: Bytes,
    ) -> Result<(), Error> {
        // Authorization, also for empty input.
        self.shared.terminals.find(who, id)?;
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            let bytes = chunk.len() as u64;
            let write = |id| request::Call::WriteTerminal(WriteTerminal { id, data: chunk });
            match self.terminal_call(who, id, write, "type").await? {
                reply::Reply::Done(done) if done.bytes == bytes => {}
                reply::Reply::Done(_) => {
                    return Err(Error::InputClosed("it has ended, or does not read"));
                }
                _ => return Err(self.terminal_misbehaved(who, id)),
            }
        }
        Ok(())
    }

    /// Changes the size of a terminal.
    pub async fn resize_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        (rows, cols): (u16, u16),
    ) -> Result<(), Error> {
        let (rows, cols) = (rows.into(), cols.into());
        let resize = |id| request::Call::ResizeTerminal(ResizeTerminal { id, rows, cols });
        match self.terminal_call(who, id, resize, "resize").await? {
            reply::Reply::Done(_) => Ok(()),
            _ => Err(self.terminal_misbehaved(who, id)),
        }
    }

    /// Foreground process group of a terminal, and whether it waits for input.
    pub async fn terminal_foreground(
        &self,
        who: &Principal,
        id: &TerminalId,
    ) -> Result<Foreground, Error> {
        let inspect = |id| request::Call::InspectTerminal(InspectTerminal { id });
        match self.terminal_call(who, id, inspect, "inspect").await? {
            reply::Reply::Terminal(state) if state.foreground >= 0 => Ok(Foreground {
                group: state.foreground,
                input_waiting: match state.input_waiting() {
                    Waiting::Yes => Some(true),
                    Waiting::No => Some(false),
                    Waiting::Unspecified => None,
                },
            }),
            _ => Err(self.terminal_misbehaved(who, id)),
        }
    }

    /// Signals the foreground process group of a terminal; returns its id.
    pub async fn signal_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        signal: i32,
    ) -> Result<i32, Error> {
        if !(1..=SIGNAL_MAX).contains(&signal) {
            return Err(Error::Invalid(format!(
                "signal {signal} does not exist: use 1 to {SIGNAL_MAX}"
            )));
        }
        let audit = self.audited(who, "terminal.signal", id.as_str());
        audit.end(self.send_signal(who, id, signal).await)
    }

    async fn send_signal(
        &self,
        who: &Principal,
        id: &TerminalId,
        signal: i32,
    ) -> Result<i32, Error> {
        let send = |id| request::Call::SignalTerminal(SignalTerminal { id, signal });
        match self.terminal_call(who, id, send, "signal").await? {
            reply::Reply::Terminal(state) if state.foreground > 0 => Ok(state.foreground),
            _ => Err(self.terminal_misbehaved(who, id)),
        }
    }

    /// Ends a terminal with all that its command started: SIGTERM, grace period, SIGKILL.
    pub async fn destroy_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        grace: Option<Duration>,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "terminal.destroy", id.as_str());
        audit.end(self.end_terminal(who, id, grace).await)
    }

    async fn end_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        grace: Option<Duration>,
    ) -> Result<(), Error> {
        let entry = self.shared.terminals.find(who, id)?;
        let grace = grace.unwrap_or(GRACE_DEFAULT);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let end = |id| request::Call::EndTerminal(EndTerminal { id, grace_ms });
        self.terminal_call(who, id, end, "destroy").await?;
        self.shared.forget_terminal(id).await;
        let detail = json!({ "terminal_id": id.as_str() });
        let recorder = &self.shared.recorder;
        recorder.event(&entry.live.record, "terminal_destroyed", detail);
        Ok(())
    }

    /// The terminals of a session, the newest first.
    pub async fn list_terminals(
        &self,
        who: &Principal,
        session: &SessionId,
    ) -> Result<Vec<TerminalView>, Error> {
        let live = self.live(who, session).await?;
        self.shared.look_at_terminals(&live).await
    }

    /// A call about one terminal that has one reply.
    async fn terminal_call(
        &self,
        who: &Principal,
        id: &TerminalId,
        request: impl FnOnce(String) -> request::Call,
        what: &str,
    ) -> Result<reply::Reply, Error> {
        let entry = self.shared.terminals.find(who, id)?;
        let mut call = self
            .shared
            .start_terminal_call(&entry, request, what)
            .await?;
        let reply = call.reply().await;
        self.shared.forget_missing(id, reply).await
    }

    fn terminal_misbehaved(&self, who: &Principal, id: &TerminalId) -> Error {
        match self.shared.terminals.find(who, id) {
            Ok(entry) => {
                let what = "it sent a message that does not belong to a terminal";
                crate::guest::misbehaved(&entry.live.record.id, what)
            }
            Err(gone) => gone,
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Crash recovery: restores the terminals of adopted sessions, removes the others.
    pub(crate) async fn restore_terminals(&self) -> Result<(), Error> {
        for record in self.store.terminals().await? {
            match self.find_any(&record.session) {
                Some(live) => self.terminals.add(live, record),
                None => self.store.remove_terminal(&record.id).await?,
            }
        }
        Ok(())
    }

    /// Removes the terminals of an ended session.
    pub(crate) async fn forget_terminals(&self, live: &Arc<Live>) {
        self.terminals
            .map()
            .retain(|_, entry| !Arc::ptr_eq(&entry.live, live));
        let session = &live.record.id;
        if let Err(error) = self.store.remove_terminals_of(session).await {
            tracing::warn!(%session, %error, "terminals cannot be removed from the store until the next start");
        }
    }

    async fn forget_terminal(&self, id: &TerminalId) {
        self.terminals.map().remove(id);
        if let Err(error) = self.store.remove_terminal(id).await {
            tracing::warn!(terminal = %id, %error, "a terminal cannot be removed from the store until its session ends");
        }
    }

    /// Removes a terminal that its guest reports as not found.
    async fn forget_missing<T>(
        &self,
        id: &TerminalId,
        answer: Result<T, Error>,
    ) -> Result<T, Error> {
        match answer {
            Err(Error::Guest {
                code: Code::NotFound,
                ..
            }) => {
                self.forget_terminal(id).await;
                Err(Error::TerminalNotFound(id.clone()))
            }
            answer => answer,
        }
    }

    async fn start_terminal_call(
        &self,
        entry: &Entry,
        request: impl FnOnce(String) -> request::Call,
        what: &str,
    ) -> Result<Call, Error> {
        let used = entry.live.begin(Purpose::Call, 0, &self.recorder)?;
        let id = entry.record.id.to_string();
        let what = format!("{what} terminal {id}");
        Call::start(used, request(id), what).await
    }

    /// Status of a session's terminals from its guest, the newest first. Those that the guest does
    /// not list are removed.
    async fn look_at_terminals(&self, live: &Arc<Live>) -> Result<Vec<TerminalView>, Error> {
        let known = self.terminals.of(live);
        if known.is_empty() {
            return Ok(Vec::new());
        }
        let used = live.begin(Purpose::Call, 0, &self.recorder)?;
        let request = request::Call::ListTerminals(ListTerminals {});
        let mut call = Call::start(used, request, "list terminals".to_owned()).await?;
        let listed = match call.reply().await? {
            reply::Reply::Terminals(list) if list.terminals.len() <= 2 * PER_SESSION_MAX => {
                list.terminals
            }
            _ => return Err(call.misbehaved("it did not list its terminals")),
        };
        let listed: HashMap<&str, &proto::TerminalState> =
            listed.iter().map(|state| (&*state.id, state)).collect();
        let mut views = Vec::new();
        for record in known {
            match listed.get(record.id.as_str()) {
                Some(state) => views.push(view(record, state)),
                None => self.forget_terminal(&record.id).await,
            }
        }
        views.sort_by(|a, b| (b.created_at, &a.id).cmp(&(a.created_at, &b.id)));
        Ok(views)
    }
}

// === impl Terminals ===

impl Terminals {
    /// Looks up one of the caller's terminals.
    fn find(&self, who: &Principal, id: &TerminalId) -> Result<Entry, Error> {
        let entry = self.map().get(id).cloned();
        entry
            .filter(|entry| who.may_use(&entry.live.record.owner))
            .ok_or_else(|| Error::TerminalNotFound(id.clone()))
    }

    fn add(&self, live: Arc<Live>, record: TerminalRecord) {
        let entry = Entry {
            live,
            record: record.clone(),
        };
        self.map().insert(record.id, entry);
    }

    /// The terminals of a session.
    pub(crate) fn of(&self, live: &Arc<Live>) -> Vec<TerminalRecord> {
        let terminals = self.map();
        let own = terminals
            .values()
            .filter(|entry| Arc::ptr_eq(&entry.live, live));
        own.map(|entry| entry.record.clone()).collect()
    }

    fn map(&self) -> MutexGuard<'_, HashMap<TerminalId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn view(record: TerminalRecord, state: &proto::TerminalState) -> TerminalView {
    TerminalView {
        id: record.id,
        session: record.session,
        pid: state.pid,
        program: record.program,
        rows: state.rows,
        cols: state.cols,
        created_at: record.created_at,
        // An impossible exit is an exit all the same.
        exited: state.exited.as_ref().map(|exited| {
            exit(exited).unwrap_or(TerminalExit {
                exit_code: -1,
                signal: 0,
            })
        }),
    }
}

/// Validates an exit; none for an impossible one.
fn exit(exited: &proto::Exited) -> Option<TerminalExit> {
    let possible =
        (0..=255).contains(&exited.exit_code) && (0..=SIGNAL_MAX).contains(&exited.signal);
    possible.then_some(TerminalExit {
        exit_code: exited.exit_code,
        signal: exited.signal,
    })
}
