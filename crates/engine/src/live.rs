//! One session that is not over: its sandbox, its phase, and who is using it right now.

mod family;
mod phases;

pub(crate) use phases::{left_active, within};

use crate::Error;
use crate::metrics;
use crate::recorder::{Recorder, now_ms};
use k8e_driver::Sandbox;
use k8e_egress::{FlowMark, Gate};
use k8e_model::{EgressPolicy, Flow, LimitEvents, Phase, Session, UnixMillis};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// File and process calls at once in one session: with the runs well under the guest's 512 connections.
const CALLS_MAX: usize = 256;

/// Calls at once that wait for somebody to decide: more than one for each question that may be open.
const WAITS_MAX: usize = 256;

/// The store learns of a session's last use at most this often.
const TOUCH_EVERY_MS: i64 = 1000;

/// A session that is not over.
pub(crate) struct Live {
    /// As it was made; what changes is in `state` and `phase`.
    pub(crate) record: Session,
    /// Of a sub-agent: whose sandbox it lives in.
    parent: Option<Arc<Live>>,
    sandbox: OnceLock<Arc<dyn Sandbox>>,
    /// The only way out of it.
    gate: Mutex<Option<Arc<Gate>>>,
    phase: watch::Sender<Phase>,
    // Held for a few instructions and never across an await.
    state: Mutex<State>,
    /// Held while what it may reach is changed.
    egress_turn: tokio::sync::Mutex<()>,
    /// Held while its sandbox is frozen, thawed or removed.
    pause_turn: tokio::sync::Mutex<()>,
    ttl_at: Option<Instant>,
}

struct State {
    reason: String,
    /// Why removing the sandbox failed.
    failure: Option<String>,
    /// What it may reach now.
    egress: EgressPolicy,
    last_used: UnixMillis,
    touched: UnixMillis,
    used: Instant,
    /// Its entry among the deadlines.
    deadline: Option<Instant>,
    runs: usize,
    background: usize,
    calls: usize,
    connections: usize,
    /// Calls that wait for a person: they keep it from being idle, but not from resting.
    waits: usize,
    /// Uses of its sub-agents.
    lent: usize,
    /// Uses that began so far.
    begun: u64,
    /// Its sub-agents that are not over.
    children: Vec<Arc<Live>>,
    /// Its sandbox was told to rest, because nothing happens in it.
    resting: bool,
    /// When it is worth looking again whether it can rest.
    look_at: Instant,
    /// When it was last resumed by who paused it.
    resumed: Option<Instant>,
}

/// What a session is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Run,
    /// A run that outlives the call that started it.
    Background,
    Call,
    /// Nothing in the sandbox: somebody outside is waited for.
    Wait,
    /// By a sub-agent, which has bounds of its own.
    Lend,
    /// Somebody visits a service in it.
    Connection,
}

/// A use of a session: while it is held the session is not idle.
pub(crate) struct Use {
    pub(crate) live: Arc<Live>,
    purpose: Purpose,
    recorder: Recorder,
    /// Of a sub-agent's parent.
    _above: Option<Box<Use>>,
}

// === impl Live ===

impl Live {
    /// Stored stamps are wall time; deadlines are the monotonic clock's, counted from now.
    pub(crate) fn new(record: Session) -> Self {
        Self::with_parent(record, None)
    }

    /// A sub-agent, in its parent's sandbox.
    pub(crate) fn new_child(record: Session, parent: &Arc<Self>) -> Self {
        let child = Self::with_parent(record, Some(Arc::clone(parent)));
        if let Some(sandbox) = parent.sandbox() {
            child.set_sandbox(Arc::clone(sandbox));
        }
        child
    }

    fn with_parent(record: Session, parent: Option<Arc<Self>>) -> Self {
        let (now, wall) = (Instant::now(), now_ms());
        let ago = |stamp: UnixMillis| {
            Duration::from_millis(wall.saturating_sub(stamp).max(0).unsigned_abs())
        };
        let past = |stamp| now.checked_sub(ago(stamp)).unwrap_or(now);
        let ttl_at = record.lifetime.ttl.map(|ttl| past(record.created_at) + ttl);
        let state = State {
            reason: record.reason.clone(),
            failure: None,
            egress: record.egress.clone(),
            last_used: record.last_used,
            touched: record.last_used,
            used: past(record.last_used),
            deadline: None,
            runs: 0,
            background: 0,
            calls: 0,
            connections: 0,
            waits: 0,
            lent: 0,
            begun: 0,
            children: Vec::new(),
            resting: false,
            look_at: now,
            resumed: None,
        };
        Self {
            parent,
            sandbox: OnceLock::new(),
            gate: Mutex::default(),
            phase: watch::Sender::new(record.phase),
            state: Mutex::new(state),
            egress_turn: tokio::sync::Mutex::default(),
            pause_turn: tokio::sync::Mutex::default(),
            ttl_at,
            record,
        }
    }

    pub(crate) fn sandbox(&self) -> Option<&Arc<dyn Sandbox>> {
        self.sandbox.get()
    }

    /// Set once, as soon as there is one to destroy.
    pub(crate) fn set_sandbox(&self, sandbox: Arc<dyn Sandbox>) {
        if self.sandbox.set(sandbox).is_err() {
            unreachable!("a session gets one sandbox");
        }
    }

    /// Of a sub-agent: whose sandbox it lives in.
    pub(crate) fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// A sandbox of a pool, which rests if that is worth while, and its gate.
    pub(crate) fn set_warm_sandbox(&self, sandbox: Arc<dyn Sandbox>, gate: Option<Arc<Gate>>) {
        self.state().resting = sandbox.costs_idle();
        self.set_sandbox(sandbox);
        self.set_gate(gate);
    }

    pub(crate) fn gate(&self) -> Option<Arc<Gate>> {
        let owner = self.parent.as_deref().unwrap_or(self);
        owner
            .gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Where its attempts to reach somebody are now.
    pub(crate) fn egress_mark(&self) -> FlowMark {
        self.gate()
            .map_or_else(FlowMark::default, |gate| gate.mark())
    }

    /// What it was denied since then.
    pub(crate) fn denied_since(&self, mark: FlowMark) -> Vec<Flow> {
        self.gate()
            .map_or_else(Vec::new, |gate| gate.denied_since(mark))
    }

    /// None closes the one there is, with all connections.
    pub(crate) fn set_gate(&self, gate: Option<Arc<Gate>>) {
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate;
    }

    /// Since when nobody uses it, when that may be long enough for its sandbox to rest.
    pub(crate) fn quiet_since(&self, now: Instant, quiet: Duration) -> Option<Instant> {
        let worth =
            self.parent.is_none() && self.sandbox().is_some_and(|sandbox| sandbox.costs_idle());
        let state = self.state();
        let unused = !state.resting && state.uses() == 0;
        let due = now >= state.used + quiet && now >= state.look_at;
        (worth && unused && due && self.phase() == Phase::Active).then_some(state.used)
    }

    /// Has its sandbox rest, unless it was used or paused meanwhile.
    pub(crate) fn rest(&self, quiet_since: Instant) {
        let mut state = self.state();
        if state.uses() == 0
            && state.used == quiet_since
            && self.phase() == Phase::Active
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.pause();
            state.resting = true;
        }
    }

    /// It cannot rest now.
    pub(crate) fn look_again(&self, at: Instant) {
        self.state().look_at = at;
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Creating → active. False when something ended it meanwhile. A sub-agent of one that is paused
    /// is too.
    pub(crate) fn activate(&self) -> bool {
        // Held: its parent's phase must not change before this one's.
        let _held = self.parent.as_ref().map(|parent| parent.state());
        let above = self.parent.as_ref().map(|parent| parent.phase());
        let mut state = self.state();
        state.used = Instant::now();
        if above.is_some_and(Phase::is_ending) || !self.advance(Phase::Active) {
            return false;
        }
        if above == Some(Phase::Paused) {
            self.advance(Phase::Paused);
        }
        true
    }

    /// Anything alive → terminating. False when somebody else was first.
    pub(crate) fn begin_end(&self, reason: &str) -> bool {
        self.terminate(&mut self.state(), reason)
    }

    /// The same, unless it is used, has sub-agents, or more than one use of it began so far.
    pub(crate) fn begin_end_unused(&self, reason: &str) -> bool {
        let mut state = self.state();
        let used = state.uses() + state.waits > 0 || state.begun > 1;
        !used && state.children.is_empty() && self.terminate(&mut state, reason)
    }

    fn terminate(&self, state: &mut State, reason: &str) -> bool {
        let first = self.advance(Phase::Terminating);
        if first {
            reason.clone_into(&mut state.reason);
        }
        first
    }

    /// Terminating → ended.
    pub(crate) fn finish_end(&self, failure: Option<String>) {
        let mut state = self.state();
        state.failure = failure;
        self.advance(Phase::Ended);
    }

    /// Waits for the end; an error when something of the sandbox may be left.
    pub(crate) async fn ended(&self) -> Result<(), Error> {
        let mut phases = self.phases();
        // The sender is in self: it cannot be gone.
        phases.wait_for(|phase| *phase == Phase::Ended).await.ok();
        self.state()
            .failure
            .clone()
            .map_or(Ok(()), |failure| Err(Error::Destroy(failure)))
    }

    pub(crate) fn reason(&self) -> String {
        self.state().reason.clone()
    }

    /// What a caller is told whose session is going away under it.
    pub(crate) fn gone(&self) -> Error {
        Error::SessionEnded {
            id: self.record.id.clone(),
            reason: self.reason(),
        }
    }

    pub(crate) fn limit_events(&self) -> LimitEvents {
        self.sandbox()
            .map(|sandbox| sandbox.limit_events())
            .unwrap_or_default()
    }

    /// Its record as it is now.
    pub(crate) fn snapshot(&self) -> Session {
        // Before its own state is held: a parent's is always held first.
        let egress = self.egress();
        let state = self.state();
        Session {
            phase: self.phase(),
            reason: state.reason.clone(),
            egress,
            last_used: state.last_used,
            ..self.record.clone()
        }
    }

    /// When it ends if nobody uses it from now on. While it is used or paused only its ttl counts.
    pub(crate) fn ends_at(&self, now: Instant) -> Option<Instant> {
        let state = self.state();
        let busy = state.uses() + state.waits > 0 || self.phase() == Phase::Paused;
        let used = if busy { now } else { state.used };
        let idle_at = self.record.lifetime.idle.map(|idle| used + idle);
        [self.ttl_at, idle_at].into_iter().flatten().min()
    }

    /// Remembers its entry among the deadlines; returns the one before.
    pub(crate) fn set_deadline(&self, at: Option<Instant>) -> Option<Instant> {
        std::mem::replace(&mut self.state().deadline, at)
    }

    /// Why it ends now.
    pub(crate) fn expiry_reason(&self, now: Instant) -> String {
        match (self.ttl_at, self.record.lifetime) {
            (Some(at), lifetime) if at <= now => format!(
                "its time of {:?} was over",
                lifetime.ttl.unwrap_or_default()
            ),
            (_, lifetime) => format!("nobody used it for {:?}", lifetime.idle.unwrap_or_default()),
        }
    }

    /// Background runs that are not over.
    pub(crate) fn background_runs(&self) -> usize {
        self.state().background
    }

    /// Begins a use; `runs_max` is how many runs or connections of that purpose there may be.
    pub(crate) fn begin(
        self: &Arc<Self>,
        purpose: Purpose,
        runs_max: usize,
        recorder: &Recorder,
    ) -> Result<Use, Error> {
        self.begin_in(purpose, runs_max, recorder, false)
    }

    /// The same of one that may be paused, for who waits until it is not.
    pub(crate) fn begin_anyway(
        self: &Arc<Self>,
        purpose: Purpose,
        recorder: &Recorder,
    ) -> Result<Use, Error> {
        self.begin_in(purpose, usize::MAX, recorder, true)
    }

    fn begin_in(
        self: &Arc<Self>,
        purpose: Purpose,
        runs_max: usize,
        recorder: &Recorder,
        paused_too: bool,
    ) -> Result<Use, Error> {
        self.check_phase(&self.state(), paused_too)?;
        let above = match &self.parent {
            Some(parent) => Some(Box::new(parent.begin_in(
                Purpose::Lend,
                0,
                recorder,
                paused_too,
            )?)),
            None => None,
        };
        let mut state = self.state();
        self.check_phase(&state, paused_too)?;
        let busy = |what, max| {
            Err(metrics::refused(Error::SessionBusy {
                id: self.record.id.clone(),
                what,
                max,
            }))
        };
        match purpose {
            Purpose::Run if state.runs >= runs_max => return busy("commands", runs_max),
            Purpose::Call if state.calls >= CALLS_MAX => return busy("file calls", CALLS_MAX),
            Purpose::Wait if state.waits >= WAITS_MAX => {
                return busy("calls that wait", WAITS_MAX);
            }
            Purpose::Background if state.background >= runs_max => {
                return busy("background runs", runs_max);
            }
            Purpose::Connection if state.connections >= runs_max => {
                return busy("connections to its services", runs_max);
            }
            Purpose::Run => state.runs += 1,
            Purpose::Background => state.background += 1,
            Purpose::Call => state.calls += 1,
            Purpose::Wait => state.waits += 1,
            Purpose::Lend => state.lent += 1,
            Purpose::Connection => state.connections += 1,
        }
        state.begun += 1;
        if purpose != Purpose::Wait {
            self.wake(&mut state);
        }
        drop(state);
        Ok(Use {
            live: Arc::clone(self),
            purpose,
            recorder: recorder.clone(),
            _above: above,
        })
    }

    /// Its sandbox rests no more.
    fn wake(&self, state: &mut State) {
        if std::mem::take(&mut state.resting)
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.resume();
        }
    }

    /// What it may reach now.
    pub(crate) fn egress(&self) -> EgressPolicy {
        let owner = self.parent.as_deref().unwrap_or(self);
        owner.state().egress.clone()
    }

    pub(crate) fn set_egress(&self, policy: EgressPolicy) {
        self.state().egress = policy;
    }

    /// Waits until nobody else changes what it may reach.
    pub(crate) async fn egress_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.egress_turn.lock().await
    }

    /// Whether it can be used now, or why not.
    pub(crate) fn check_active(&self) -> Result<(), Error> {
        self.check_phase(&self.state(), false)
    }

    /// Whether it is not paused.
    pub(crate) fn check_awake(&self) -> Result<(), Error> {
        match self.phase() {
            Phase::Paused => Err(self.paused()),
            Phase::Creating | Phase::Active | Phase::Terminating | Phase::Ended => Ok(()),
        }
    }

    /// A sub-agent is resumed with its parent.
    fn paused(&self) -> Error {
        let owner = self.parent.as_deref().unwrap_or(self);
        Error::SessionPaused(owner.record.id.clone())
    }

    fn check_phase(&self, state: &State, paused_too: bool) -> Result<(), Error> {
        match self.phase() {
            Phase::Creating => Err(Error::SessionNotReady(self.record.id.clone())),
            Phase::Active => Ok(()),
            Phase::Paused if paused_too => Ok(()),
            Phase::Paused => Err(self.paused()),
            Phase::Terminating | Phase::Ended => Err(Error::SessionEnded {
                id: self.record.id.clone(),
                reason: state.reason.clone(),
            }),
        }
    }

    fn advance(&self, next: Phase) -> bool {
        self.phase.send_if_modified(|phase| {
            let forward = phase.may_become(next);
            if forward {
                *phase = next;
            }
            forward
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn uses(&self) -> usize {
        self.runs + self.background + self.calls + self.connections + self.lent
    }

    fn resume(&mut self) {
        let now = Instant::now();
        (self.used, self.resumed) = (now, Some(now));
        self.last_used = now_ms();
    }
}

// === impl Use ===

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.live.state();
        match self.purpose {
            Purpose::Run => state.runs -= 1,
            Purpose::Background => state.background -= 1,
            Purpose::Call => state.calls -= 1,
            Purpose::Wait => state.waits -= 1,
            Purpose::Lend => state.lent -= 1,
            Purpose::Connection => state.connections -= 1,
        }
        state.used = Instant::now();
        state.last_used = now_ms();
        if state.last_used - state.touched >= TOUCH_EVERY_MS {
            state.touched = state.last_used;
            self.recorder.touch(&self.live.record.id, state.last_used);
        }
    }
}
