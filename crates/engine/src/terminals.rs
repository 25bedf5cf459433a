//! Terminals: commands on a pseudo-terminal that outlive the call that made them.
//!
//! A sandbox's guest has the terminals, what they said last, and who is in the foreground; here is
//! only whose they are, also in the store, so that a restart of the server ends none. What a guest
//! says of its terminals is a claim about itself.
//!
//! What is typed and said is in no transcript: passwords are typed into terminals. A terminal that
//! nobody is attached to does not keep its session from being idle.
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

/// Terminals of one session, as K8E has it; a guest has as many places.
const PER_SESSION_MAX: usize = 64;

/// Linux knows 1 to 64.
const SIGNAL_MAX: i32 = 64;

/// What those get that were asked to end, when nobody says.
const GRACE_DEFAULT: Duration = Duration::from_secs(1);

/// A terminal, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminalView {
    /// Random.
    pub id: TerminalId,
    /// Where it is.
    pub session: SessionId,
    /// Of its command, inside the sandbox.
    pub pid: i32,
    /// The name of its program, for people.
    pub program: String,
    /// Its size.
    pub rows: u32,
    /// Its size.
    pub cols: u32,
    /// When it was made.
    pub created_at: UnixMillis,
    /// How it ended.
    pub exited: Option<TerminalExit>,
}

/// How a terminal's command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalExit {
    /// 128+n when a signal ended it.
    pub exit_code: i32,
    /// 0 when it exited by itself.
    pub signal: i32,
}

/// Who is in the foreground of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreground {
    /// 0 when there is none.
    pub group: i32,
    /// Whether it waits for what is typed; none when that cannot be known.
    pub input_waiting: Option<bool>,
}

/// Whose the terminals are.
#[derive(Default)]
pub(crate) struct Terminals(Mutex<HashMap<TerminalId, Entry>>);

#[derive(Clone)]
struct Entry {
    live: Arc<Live>,
    record: TerminalRecord,
}

// === impl Sessions ===

impl Sessions {
    /// Types into a terminal.
    pub async fn write_terminal(
        &self,
        who: &Principal,
        id: &TerminalId,
        mut data: Bytes,
    ) -> Result<(), Error> {
        // Also for who types nothing.
        self.shared.terminals.find(who, id)?;
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            let bytes = chunk.len() as u64;
            let write = |id| request::Call::WriteTerminal(WriteTerminal { id, data: chunk });
            match self.terminal_call(who, id, write, "type").await? {
                reply::Reply::Done(done) if done.bytes == bytes => {}
                reply::Reply::Done(_) => {
                    return Err(Error::InputClosed("it is over, or does not read"));
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

    /// Who is in the foreground of a terminal, and whether it waits for input.
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

    /// Signals the group in the foreground of a terminal; returns which that was.
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

    /// Ends a terminal with all that its command started: asks, waits that long, and kills.
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
                let what = "it said something that does not belong to a terminal";
                crate::guest::misbehaved(&entry.live.record.id, what)
            }
            Err(gone) => gone,
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Finds the terminals of sessions again that live on.
    pub(crate) async fn restore_terminals(&self) -> Result<(), Error> {
        for record in self.store.terminals().await? {
            match self.find_any(&record.session) {
                Some(live) => self.terminals.add(live, record),
                None => self.store.remove_terminal(&record.id).await?,
            }
        }
        Ok(())
    }

    /// The terminals of a session that is over are too.
    pub(crate) async fn forget_terminals(&self, live: &Arc<Live>) {
        self.terminals
            .map()
            .retain(|_, entry| !Arc::ptr_eq(&entry.live, live));
        let session = &live.record.id;
        if let Err(error) = self.store.remove_terminals_of(session).await {
            tracing::warn!(%session, %error, "terminals stay written down until the next start");
        }
    }

    async fn forget_terminal(&self, id: &TerminalId) {
        self.terminals.map().remove(id);
        if let Err(error) = self.store.remove_terminal(id).await {
            tracing::warn!(terminal = %id, %error, "a terminal stays written down until its session ends");
        }
    }

    /// One that its guest does not know is gone.
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

    /// What a guest says of the terminals that are known here, the newest first. Those that it does
    /// not know are forgotten.
    async fn look_at_terminals(&self, live: &Arc<Live>) -> Result<Vec<TerminalView>, Error> {
        let known = self.terminals.of(live);
        if known.is_empty() {
            return Ok(Vec::new());
        }
        let used = live.begin(Purpose::Call, 0, &self.recorder)?;
        let request = request::Call::ListTerminals(ListTerminals {});
        let mut call = Call::start(used, request, "list terminals".to_owned()).await?;
        let said = match call.reply().await? {
            reply::Reply::Terminals(list) if list.terminals.len() <= 2 * PER_SESSION_MAX => {
                list.terminals
            }
            _ => return Err(call.misbehaved("it did not list its terminals")),
        };
        let said: HashMap<&str, &proto::TerminalState> =
            said.iter().map(|state| (&*state.id, state)).collect();
        let mut views = Vec::new();
        for record in known {
            match said.get(record.id.as_str()) {
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
    /// One of the caller's.
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

    /// Those of a session.
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
        // An end that cannot be is one all the same.
        exited: state.exited.as_ref().map(|exited| {
            exit(exited).unwrap_or(TerminalExit {
                exit_code: -1,
                signal: 0,
            })
        }),
    }
}

/// None when it cannot be.
fn exit(exited: &proto::Exited) -> Option<TerminalExit> {
    let possible =
        (0..=255).contains(&exited.exit_code) && (0..=SIGNAL_MAX).contains(&exited.signal);
    possible.then_some(TerminalExit {
        exit_code: exited.exit_code,
        signal: exited.signal,
    })
}
