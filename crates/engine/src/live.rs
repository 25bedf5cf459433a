//! A live session: sandbox, phase, reference count of uses, TTL and idle deadlines, idle stop and wake.

mod phases;
mod sub_agents;

pub(crate) use phases::{left_active, within};

use crate::Error;
use crate::interpreter::Contexts;
use crate::metrics;
use crate::recorder::{Recorder, now_ms};
use k8e_driver::Sandbox;
use k8e_egress::{FlowMark, Gate};
use k8e_model::{EgressPolicy, Flow, Lifetime, LimitEvents, Phase, Session, UnixMillis};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Concurrent file and process calls per session: together with the runs well under the guest's 512 connections.
const CALLS_MAX: usize = 256;

/// Concurrent calls per session that wait for an approval: more than one per pending approval.
const WAITS_MAX: usize = 256;

/// Debounce of writing a session's last use to the store, in milliseconds.
const TOUCH_EVERY_MS: i64 = 1000;

/// A session that has not ended.
pub(crate) struct Live {
    /// Record at creation; mutable state is in `state` and `phase`.
    pub(crate) record: Session,
    /// Of a sub-agent: the session whose sandbox it shares.
    parent: Option<Arc<Live>>,
    sandbox: OnceLock<Arc<dyn Sandbox>>,
    /// Egress gate, the sandbox's only way out.
    gate: Mutex<Option<Arc<Gate>>>,
    phase: watch::Sender<Phase>,
    // Held for a few instructions and never across an await.
    state: Mutex<State>,
    /// Serializes changes of the egress policy.
    egress_turn: tokio::sync::Mutex<()>,
    /// Serializes freezing, thawing and removal of the sandbox.
    pause_turn: tokio::sync::Mutex<()>,
    /// Read-locked while a call connects to the guest, write-locked while the guest does not listen.
    connecting: tokio::sync::RwLock<()>,
    /// Whether followers of background runs are to close their connections to the guest.
    detach: watch::Sender<bool>,
    /// Contexts of the code interpreter.
    pub(crate) contexts: Contexts,
}

struct State {
    reason: String,
    /// Error of the sandbox's removal.
    failure: Option<String>,
    /// Current egress policy.
    egress: EgressPolicy,
    /// Current TTL and idle timeout, and the end of the TTL.
    lifetime: Lifetime,
    ttl_at: Option<Instant>,
    last_used: UnixMillis,
    touched: UnixMillis,
    used: Instant,
    /// Its entry in the expiry queue.
    deadline: Option<Instant>,
    runs: usize,
    background: usize,
    calls: usize,
    connections: usize,
    /// Calls that wait for an approval: they hold off idle expiry, but not the idle stop.
    waits: usize,
    /// Uses by its sub-agents.
    lent: usize,
    /// Uses begun since creation.
    begun: u64,
    /// Its live sub-agents.
    children: Vec<Arc<Live>>,
    /// Its sandbox is stopped because it was idle.
    idle_stopped: bool,
    /// Earliest time of the next idle check.
    idle_check_at: Instant,
    /// Time of the last resume; none if it was never paused.
    resumed: Option<Instant>,
}

/// Kind of use of a session; each has its own counter and limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Run,
    /// A background run.
    Background,
    Call,
    /// Waits for an approval; nothing runs in the sandbox.
    Wait,
    /// Use by a sub-agent, which has its own limits.
    Lend,
    /// Connection to an exposed service.
    Connection,
}

/// Reference-counted use of a session: while one is held, the session is not idle.
pub(crate) struct Use {
    pub(crate) live: Arc<Live>,
    purpose: Purpose,
    recorder: Recorder,
    /// Use of the parent, when the session is a sub-agent.
    _above: Option<Box<Use>>,
}

// === impl Live ===

impl Live {
    /// Converts stored wall-clock times to monotonic deadlines, counted from now.
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
            lifetime: record.lifetime,
            ttl_at,
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
            idle_stopped: false,
            idle_check_at: now,
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
            connecting: tokio::sync::RwLock::default(),
            detach: watch::Sender::new(false),
            contexts: Contexts::default(),
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

    /// Of a sub-agent: the session whose sandbox it shares.
    pub(crate) fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// Sets a warm sandbox and its gate. Warm sandboxes are idle-stopped where idling costs CPU.
    pub(crate) fn set_warm_sandbox(&self, sandbox: Arc<dyn Sandbox>, gate: Option<Arc<Gate>>) {
        self.state().idle_stopped = sandbox.costs_idle();
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

    /// Current position in its log of egress flows.
    pub(crate) fn egress_mark(&self) -> FlowMark {
        self.gate()
            .map_or_else(FlowMark::default, |gate| gate.mark())
    }

    /// Denied flows since a position.
    pub(crate) fn denied_since(&self, mark: FlowMark) -> Vec<Flow> {
        self.gate()
            .map_or_else(Vec::new, |gate| gate.denied_since(mark))
    }

    /// Replaces the gate; none closes the current one with all its connections.
    pub(crate) fn set_gate(&self, gate: Option<Arc<Gate>>) {
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate;
    }

    /// Time of the last use, when the session is due for an idle stop.
    pub(crate) fn idle_since(&self, now: Instant, idle_for: Duration) -> Option<Instant> {
        let worth =
            self.parent.is_none() && self.sandbox().is_some_and(|sandbox| sandbox.costs_idle());
        let state = self.state();
        let unused = !state.idle_stopped && state.uses() == 0;
        let due = now >= state.used + idle_for && now >= state.idle_check_at;
        (worth && unused && due && self.phase() == Phase::Active).then_some(state.used)
    }

    /// Idle stop: stops its sandbox, unless it was used or paused since `idle_since`.
    pub(crate) fn idle_stop(&self, idle_since: Instant) {
        let mut state = self.state();
        if state.uses() == 0
            && state.used == idle_since
            && self.phase() == Phase::Active
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.idle_stop();
            state.idle_stopped = true;
        }
    }

    /// Sets the time of the next idle check.
    pub(crate) fn defer_idle_check(&self, at: Instant) {
        self.state().idle_check_at = at;
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Creating → active. False when it was ended meanwhile. A sub-agent of a paused session
    /// becomes paused.
    pub(crate) fn activate(&self) -> bool {
        // Lock held: the parent's phase must not change before this one's.
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

    /// Any live phase → terminating. False when it is terminating already.
    pub(crate) fn begin_end(&self, reason: &str) -> bool {
        self.terminate(&mut self.state(), reason)
    }

    /// The same, unless it is in use, has sub-agents, or was used more than once.
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

    /// Waits for the end; an error when the removal of the sandbox failed.
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

    /// The error for callers whose session ends during a call.
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

    /// Its record with the current state.
    pub(crate) fn snapshot(&self) -> Session {
        // Lock order: a parent's state is locked before a child's.
        let egress = self.egress();
        let state = self.state();
        Session {
            phase: self.phase(),
            reason: state.reason.clone(),
            egress,
            lifetime: state.lifetime,
            last_used: state.last_used,
            ..self.record.clone()
        }
    }

    /// Expiry deadline if it is not used from now on. While it is in use or paused only its TTL counts.
    pub(crate) fn ends_at(&self, now: Instant) -> Option<Instant> {
        let state = self.state();
        let busy = state.uses() + state.waits > 0 || self.phase() == Phase::Paused;
        let used = if busy { now } else { state.used };
        let idle_at = state.lifetime.idle.map(|idle| used + idle);
        [state.ttl_at, idle_at].into_iter().flatten().min()
    }

    /// The lifetime whose TTL ends `after` from now; none is never.
    pub(crate) fn lifetime_until(&self, after: Option<Duration>) -> Lifetime {
        let age = now_ms().saturating_sub(self.record.created_at).max(0);
        let age = Duration::from_millis(age.unsigned_abs());
        Lifetime {
            ttl: after.map(|after| age.saturating_add(after)),
            idle: self.state().lifetime.idle,
        }
    }

    /// Replaces its lifetime; the TTL ends `after` from now.
    pub(crate) fn set_lifetime(&self, lifetime: Lifetime, after: Option<Duration>) {
        let mut state = self.state();
        state.lifetime = lifetime;
        state.ttl_at = after.map(|after| Instant::now() + after);
    }

    /// Stores its entry in the expiry queue; returns the previous one.
    pub(crate) fn set_deadline(&self, at: Option<Instant>) -> Option<Instant> {
        std::mem::replace(&mut self.state().deadline, at)
    }

    /// Reason of expiry: TTL or idle timeout.
    pub(crate) fn expiry_reason(&self, now: Instant) -> String {
        let state = self.state();
        match (state.ttl_at, state.lifetime) {
            (Some(at), lifetime) if at <= now => {
                format!("its TTL of {:?} expired", lifetime.ttl.unwrap_or_default())
            }
            (_, lifetime) => format!("it was idle for {:?}", lifetime.idle.unwrap_or_default()),
        }
    }

    /// Number of running background runs.
    pub(crate) fn background_runs(&self) -> usize {
        self.state().background
    }

    /// Begins a use; `runs_max` limits concurrent runs or connections of that purpose.
    pub(crate) fn begin(
        self: &Arc<Self>,
        purpose: Purpose,
        runs_max: usize,
        recorder: &Recorder,
    ) -> Result<Use, Error> {
        self.begin_in(purpose, runs_max, recorder, false)
    }

    /// Begins a use of a session that may be paused, without a limit; the caller waits for the resume.
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

    /// Wakes its sandbox from an idle stop.
    fn wake(&self, state: &mut State) {
        if std::mem::take(&mut state.idle_stopped)
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.wake();
        }
    }

    /// Current egress policy; a sub-agent has its parent's.
    pub(crate) fn egress(&self) -> EgressPolicy {
        let owner = self.parent.as_deref().unwrap_or(self);
        owner.state().egress.clone()
    }

    pub(crate) fn set_egress(&self, policy: EgressPolicy) {
        self.state().egress = policy;
    }

    /// Locks changes of the egress policy.
    pub(crate) async fn egress_turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.egress_turn.lock().await
    }

    /// Held by a call until the guest has it: waits while calls are held off.
    pub(crate) async fn connecting(&self) -> tokio::sync::RwLockReadGuard<'_, ()> {
        let owner = self.parent.as_deref().unwrap_or(self);
        owner.connecting.read().await
    }

    /// Holds off new calls to the guest, also of sub-agents: they wait until the guard is dropped.
    pub(crate) async fn hold_calls(&self) -> tokio::sync::RwLockWriteGuard<'_, ()> {
        self.connecting.write().await
    }

    /// Checks that the session is active.
    pub(crate) fn check_active(&self) -> Result<(), Error> {
        self.check_phase(&self.state(), false)
    }

    /// Checks that the session is not paused.
    pub(crate) fn check_awake(&self) -> Result<(), Error> {
        match self.phase() {
            Phase::Paused => Err(self.paused()),
            Phase::Creating | Phase::Active | Phase::Terminating | Phase::Ended => Ok(()),
        }
    }

    /// Names the session to resume: for a sub-agent, its parent.
    pub(crate) fn paused(&self) -> Error {
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
