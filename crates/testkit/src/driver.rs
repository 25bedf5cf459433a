//! Fake driver: sandboxes are threads of the test, without isolation, with fault injection.

use crate::scripted::{self, Script};
use crate::thread::GuestThread;
use async_trait::async_trait;
use k8e_driver::{Driver, DriverError, GuestAddress, Probe, Restored, Sandbox, SandboxSpec};
use k8e_model::{LimitEvents, Limits, ResourceUsage, RuntimeKind, SandboxId};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// A fake driver whose sandboxes are threads of the test. Clones share their state.
#[derive(Clone)]
pub struct FakeDriver(Arc<Inner>);

struct Inner {
    kind: RuntimeKind,
    dir: tempfile::TempDir,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The script of new sandboxes; none is the real guest, in this process.
    script: Option<Script>,
    probe: Option<Probe>,
    fail_next_launch: Option<String>,
    launches_to_fail: usize,
    launches_tried: usize,
    fail_set_limits: bool,
    fail_freeze: bool,
    /// Sandboxes can be copied.
    copies: bool,
    /// Calls are open, as a guest would say.
    in_use: bool,
    /// Copied states that were not removed.
    states: HashSet<SandboxId>,
    destroys_to_fail: usize,
    launch_delay: Duration,
    launched: usize,
    sandboxes: HashMap<SandboxId, Arc<FakeSandbox>>,
}

struct FakeSandbox {
    id: SandboxId,
    address: GuestAddress,
    socket: PathBuf,
    guest: Mutex<Option<GuestThread>>,
    died: watch::Sender<bool>,
    frozen: AtomicBool,
    limits: Mutex<Limits>,
    limit_events: Mutex<LimitEvents>,
    usage: Mutex<Option<ResourceUsage>>,
}

/// The `Sandbox` that the engine gets.
struct Handle {
    driver: Arc<Inner>,
    sandbox: Arc<FakeSandbox>,
}

// === impl FakeDriver ===

impl FakeDriver {
    /// A driver that runs the real guest in this process: commands run on this machine, as this user.
    pub fn new() -> Self {
        Self::of_kind(RuntimeKind::Native)
    }

    /// The same, reporting another [`RuntimeKind`].
    pub fn of_kind(kind: RuntimeKind) -> Self {
        let dir = tempfile::tempdir().expect("a test can make a directory");
        Self(Arc::new(Inner {
            kind,
            dir,
            state: Mutex::default(),
        }))
    }

    /// A driver with scripted guests.
    pub fn scripted(script: Script) -> Self {
        let driver = Self::new();
        driver.set_script(Some(script));
        driver
    }

    /// Sets the script of sandboxes launched from now on; none is the real guest.
    pub fn set_script(&self, script: Option<Script>) {
        self.0.state().script = script;
    }

    /// Sets the result of `probe`.
    pub fn set_probe(&self, probe: Probe) {
        self.0.state().probe = Some(probe);
    }

    /// Fails the next launch with this message.
    pub fn fail_next_launch(&self, message: &str) {
        self.0.state().fail_next_launch = Some(message.to_owned());
    }

    /// Fails this many launches.
    pub fn fail_launches(&self, times: usize) {
        self.0.state().launches_to_fail = times;
    }

    /// Sets whether changing limits fails.
    pub fn fail_set_limits(&self, fail: bool) {
        self.0.state().fail_set_limits = fail;
    }

    /// Sets whether freezing fails.
    pub fn fail_freeze(&self, fail: bool) {
        self.0.state().fail_freeze = fail;
    }

    /// Sets whether running sandboxes can be copied. A copy is a new sandbox.
    pub fn set_copies(&self, copies: bool) {
        self.0.state().copies = copies;
    }

    /// Sets whether guests refuse to be copied because calls are open.
    pub fn set_in_use(&self, in_use: bool) {
        self.0.state().in_use = in_use;
    }

    /// Copied states that were not removed.
    pub fn states(&self) -> Vec<SandboxId> {
        self.0.state().states.iter().cloned().collect()
    }

    /// Whether a sandbox is frozen. Its processes belong to the test and are not stopped.
    pub fn is_frozen(&self, id: &SandboxId) -> bool {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        let sandbox = sandbox.expect("a test asks for a sandbox that exists");
        sandbox.frozen.load(Ordering::Relaxed)
    }

    /// Fails this many calls of `destroy`.
    pub fn fail_destroys(&self, times: usize) {
        self.0.state().destroys_to_fail = times;
    }

    /// Sets how long launches take.
    pub fn set_launch_delay(&self, delay: Duration) {
        self.0.state().launch_delay = delay;
    }

    /// Kills a sandbox, as the kernel would; it is listed until it is destroyed or swept.
    pub fn kill(&self, id: &SandboxId) {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        sandbox.expect("a test kills a sandbox that exists").die();
    }

    /// Kills only the guest of a sandbox, without reporting the sandbox dead.
    pub fn kill_guest(&self, id: &SandboxId) {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        drop(lock(&sandbox.expect("a test kills a guest that exists").guest).take());
    }

    /// Sets what a sandbox uses, by its counters.
    pub fn set_usage(&self, id: &SandboxId, usage: ResourceUsage) {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        *lock(&sandbox.expect("a test changes a sandbox that exists").usage) = Some(usage);
    }

    /// Sets the limit counters (OOM kills and the like) of a sandbox.
    pub fn set_limit_events(&self, id: &SandboxId, events: LimitEvents) {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        *lock(
            &sandbox
                .expect("a test changes a sandbox that exists")
                .limit_events,
        ) = events;
    }

    /// The current limits of a sandbox.
    pub fn limits(&self, id: &SandboxId) -> Limits {
        let sandbox = self.0.state().sandboxes.get(id).cloned();
        *lock(
            &sandbox
                .expect("a test asks for a sandbox that exists")
                .limits,
        )
    }

    /// Sandboxes that are not destroyed or swept.
    pub fn sandboxes(&self) -> Vec<SandboxId> {
        self.0.state().sandboxes.keys().cloned().collect()
    }

    /// Number of successful launches.
    pub fn launched(&self) -> usize {
        self.0.state().launched
    }

    /// Number of launches, including failed ones.
    pub fn launches_tried(&self) -> usize {
        self.0.state().launches_tried
    }
}

impl Default for FakeDriver {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Driver for FakeDriver {
    fn kind(&self) -> RuntimeKind {
        self.0.kind
    }

    fn probe(&self) -> Probe {
        self.0
            .state()
            .probe
            .clone()
            .unwrap_or(Probe::Usable { weaker: Vec::new() })
    }

    fn can_change_limits(&self, from: &Limits, to: &Limits) -> bool {
        from.disk_bytes == to.disk_bytes
    }

    async fn launch(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, DriverError> {
        let (delay, failure) = {
            let mut state = self.0.state();
            state.launches_tried += 1;
            let mut failure = state.fail_next_launch.take();
            if state.launches_to_fail > 0 {
                state.launches_to_fail -= 1;
                failure = Some("the machine is on fire".to_owned());
            }
            (state.launch_delay, failure)
        };
        tokio::time::sleep(delay).await;
        if let Some(message) = failure {
            return Err(DriverError::Unusable(message));
        }
        let socket = self.0.dir.path().join(format!("{}.sock", spec.id));
        let script = self.0.state().script.clone();
        let guest = match script {
            Some(script) => {
                GuestThread::start(&socket, |listener| scripted::serve(listener, script))
            }
            None => GuestThread::start(&socket, |listener| {
                k8e_guest::serve(listener, None, k8e_guest::Config::default())
            }),
        };
        let sandbox = Arc::new(FakeSandbox {
            id: spec.id.clone(),
            address: GuestAddress::new(socket.clone()),
            guest: Mutex::new(Some(guest.map_err(DriverError::step("start", "a guest"))?)),
            socket,
            died: watch::Sender::new(false),
            frozen: AtomicBool::new(false),
            limits: Mutex::new(spec.limits),
            limit_events: Mutex::default(),
            usage: Mutex::default(),
        });
        let mut state = self.0.state();
        state.launched += 1;
        state
            .sandboxes
            .insert(spec.id.clone(), Arc::clone(&sandbox));
        Ok(Box::new(Handle {
            driver: Arc::clone(&self.0),
            sandbox,
        }))
    }

    async fn launch_from(
        &self,
        spec: &SandboxSpec,
        state: &SandboxId,
    ) -> Result<(Box<dyn Sandbox>, Restored), DriverError> {
        if !self.0.state().states.contains(state) {
            return Err(DriverError::Unusable("no such state".to_owned()));
        }
        Ok((self.launch(spec).await?, Restored::Memory))
    }

    async fn remove_state(&self, state: &SandboxId) -> Result<(), DriverError> {
        self.0.state().states.remove(state);
        Ok(())
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        _limits: &Limits,
    ) -> Result<Option<Box<dyn Sandbox>>, DriverError> {
        let sandbox = self
            .0
            .state()
            .sandboxes
            .get(id)
            .filter(|sandbox| !*sandbox.died.borrow())
            .cloned();
        Ok(sandbox.map(|sandbox| {
            Box::new(Handle {
                driver: Arc::clone(&self.0),
                sandbox,
            }) as Box<dyn Sandbox>
        }))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<Vec<SandboxId>, DriverError> {
        let swept: Vec<_> = {
            let mut state = self.0.state();
            state
                .sandboxes
                .extract_if(|id, _| !keep.contains(id))
                .collect()
        };
        for (_, sandbox) in &swept {
            sandbox.die();
        }
        Ok(swept.into_iter().map(|(id, _)| id).collect())
    }
}

// === impl Inner ===

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

// === impl FakeSandbox ===

impl FakeSandbox {
    fn die(&self) {
        drop(lock(&self.guest).take());
        std::fs::remove_file(&self.socket).ok();
        self.died.send_replace(true);
    }
}

// === impl Handle ===

#[async_trait]
impl Sandbox for Handle {
    fn guest(&self) -> &GuestAddress {
        &self.sandbox.address
    }

    fn limit_events(&self) -> LimitEvents {
        *lock(&self.sandbox.limit_events)
    }

    fn usage(&self) -> Option<ResourceUsage> {
        *lock(&self.sandbox.usage)
    }

    fn set_limits(&self, limits: &Limits) -> Result<(), DriverError> {
        if self.driver.state().fail_set_limits {
            return Err(DriverError::Unusable(
                "the control group is gone".to_owned(),
            ));
        }
        *lock(&self.sandbox.limits) = *limits;
        Ok(())
    }

    async fn freeze(&self) -> Result<(), DriverError> {
        if self.driver.state().fail_freeze {
            return Err(DriverError::Unusable("there is no freezer".to_owned()));
        }
        self.sandbox.frozen.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn thaw(&self) -> Result<(), DriverError> {
        self.sandbox.frozen.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn can_copy_state(&self) -> bool {
        self.driver.state().copies
    }

    async fn copy_state(&self, state: &SandboxId) -> Result<Duration, DriverError> {
        let mut driver = self.driver.state();
        if driver.in_use {
            return Err(DriverError::InUse("calls are open".to_owned()));
        }
        driver.states.insert(state.clone());
        Ok(Duration::from_millis(1))
    }

    async fn died(&self) {
        self.sandbox
            .died
            .subscribe()
            .wait_for(|died| *died)
            .await
            .ok();
    }

    async fn destroy(&self) -> Result<(), DriverError> {
        {
            let mut state = self.driver.state();
            if state.destroys_to_fail > 0 {
                state.destroys_to_fail -= 1;
                return Err(DriverError::Exhausted("the mount is busy".to_owned()));
            }
            state.sandboxes.remove(&self.sandbox.id);
        }
        self.sandbox.die();
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
