//! One session that is not over: its sandbox, its phase, and who is using it right now.

use crate::Error;
use crate::metrics;
use crate::recorder::{Recorder, now_ms};
use k8e_driver::Sandbox;
use k8e_egress::Gate;
use k8e_model::{EgressPolicy, LimitEvents, Phase, Session, UnixMillis};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// File and process calls at once in one session: with the runs well under the guest's 512 connections.
const CALLS_MAX: usize = 256;

/// The store learns of a session's last use at most this often.
const TOUCH_EVERY_MS: i64 = 1000;

/// A session that is not over.
pub(crate) struct Live {
    /// As it was made; what changes is in `state` and `phase`.
    pub(crate) record: Session,
    sandbox: OnceLock<Arc<dyn Sandbox>>,
    /// The only way out of it.
    gate: Mutex<Option<Arc<Gate>>>,
    phase: watch::Sender<Phase>,
    // Held for a few instructions and never across an await.
    state: Mutex<State>,
    /// Held while what it may reach is changed.
    egress_turn: tokio::sync::Mutex<()>,
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
    paused: bool,
    /// When it is worth looking again whether it can be paused.
    look_at: Instant,
}

/// What a session is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Run,
    /// A run that outlives the call that started it.
    Background,
    Call,
    /// Somebody visits a service in it.
    Connection,
}

/// A use of a session: while it is held the session is not idle.
pub(crate) struct Use {
    pub(crate) live: Arc<Live>,
    purpose: Purpose,
    recorder: Recorder,
}

// === impl Live ===

impl Live {
    /// Stored stamps are wall time; deadlines are the monotonic clock's, counted from now.
    pub(crate) fn new(record: Session) -> Self {
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
            paused: false,
            look_at: now,
        };
        Self {
            sandbox: OnceLock::new(),
            gate: Mutex::default(),
            phase: watch::Sender::new(record.phase),
            state: Mutex::new(state),
            egress_turn: tokio::sync::Mutex::default(),
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

    /// A sandbox of a pool, which is paused if that is worth while, and its gate.
    pub(crate) fn set_warm_sandbox(&self, sandbox: Arc<dyn Sandbox>, gate: Option<Arc<Gate>>) {
        self.state().paused = sandbox.costs_idle();
        self.set_sandbox(sandbox);
        self.set_gate(gate);
    }

    pub(crate) fn gate(&self) -> Option<Arc<Gate>> {
        self.gate
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// None closes the one there is, with all connections.
    pub(crate) fn set_gate(&self, gate: Option<Arc<Gate>>) {
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate;
    }

    /// Since when nobody uses it, when that may be long enough to pause its sandbox.
    pub(crate) fn quiet_since(&self, now: Instant, quiet: Duration) -> Option<Instant> {
        let worth = self.sandbox().is_some_and(|sandbox| sandbox.costs_idle());
        let state = self.state();
        let unused = !state.paused && state.uses() == 0;
        let due = now >= state.used + quiet && now >= state.look_at;
        (worth && unused && due && self.phase() == Phase::Active).then_some(state.used)
    }

    /// Pauses its sandbox, unless it was used meanwhile.
    pub(crate) fn pause(&self, quiet_since: Instant) {
        let mut state = self.state();
        if state.uses() == 0
            && state.used == quiet_since
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.pause();
            state.paused = true;
        }
    }

    /// It cannot be paused now.
    pub(crate) fn look_again(&self, at: Instant) {
        self.state().look_at = at;
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Creating → active. False when something ended it meanwhile.
    pub(crate) fn activate(&self) -> bool {
        let mut state = self.state();
        state.used = Instant::now();
        self.advance(Phase::Active)
    }

    /// Anything alive → terminating. False when somebody else was first.
    pub(crate) fn begin_end(&self, reason: &str) -> bool {
        let mut state = self.state();
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
        let state = self.state();
        Session {
            phase: self.phase(),
            reason: state.reason.clone(),
            egress: state.egress.clone(),
            last_used: state.last_used,
            ..self.record.clone()
        }
    }

    /// When it ends if nobody uses it from now on. While it is used only its ttl counts.
    pub(crate) fn ends_at(&self, now: Instant) -> Option<Instant> {
        let state = self.state();
        let used = if state.uses() > 0 { now } else { state.used };
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
        let mut state = self.state();
        self.check_phase(&state)?;
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
            Purpose::Background if state.background >= runs_max => {
                return busy("background runs", runs_max);
            }
            Purpose::Connection if state.connections >= runs_max => {
                return busy("connections to its services", runs_max);
            }
            Purpose::Run => state.runs += 1,
            Purpose::Background => state.background += 1,
            Purpose::Call => state.calls += 1,
            Purpose::Connection => state.connections += 1,
        }
        if std::mem::take(&mut state.paused)
            && let Some(sandbox) = self.sandbox()
        {
            sandbox.resume();
        }
        drop(state);
        Ok(Use {
            live: Arc::clone(self),
            purpose,
            recorder: recorder.clone(),
        })
    }

    /// What it may reach now.
    pub(crate) fn egress(&self) -> EgressPolicy {
        self.state().egress.clone()
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
        self.check_phase(&self.state())
    }

    fn check_phase(&self, state: &State) -> Result<(), Error> {
        match self.phase() {
            Phase::Creating => Err(Error::SessionNotReady(self.record.id.clone())),
            Phase::Active => Ok(()),
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
        self.runs + self.background + self.calls + self.connections
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

/// Resolves when the session is no longer active.
pub(crate) async fn left_active(phases: &mut watch::Receiver<Phase>) {
    // A closed channel means that the session is gone too.
    phases.wait_for(|phase| *phase > Phase::Active).await.ok();
}
