//! The worker: the launcher's process that serves requests. One thread; requests that
//! block are served by forked processes (builder, remover).

use super::channel::Channel;
use super::concurrency::{Children, Class};
use super::request::{
    Answer, IdleSignal, LIST_IDS_MAX, LIST_LAYERS_MAX, Passed, Ready, Request, SocketFile, Start,
};
use super::{Failure, confine};
use crate::gvisor::state::{self, Saved};
use crate::gvisor::{self, Platform};
use crate::local::host::Host;
use crate::local::kind::Kind;
use crate::local::record::Record;
use crate::local::sandboxes::Sandboxes;
use crate::local::shm;
use crate::local::sys::{self, Fork};
use crate::local::uids::Uids;
use crate::native;
use crate::native::launch::Confinement;
use crate::native::seccomp::Filters;
use crate::native::sockets::Sockets as CountedSockets;
use crate::{DriverError, SandboxSpec};
use k8e_egress::Sockets;
use k8e_model::{Limits, SandboxId};
use rustix::mount::MountPropagationFlags;
use rustix::process::Signal;
use rustix::thread::UnshareFlags;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// Pidfds of first processes that are cached; on overflow they are found by their records.
const KEPT_MAX: usize = 4096;

/// An answer and its descriptors.
type Answered = Result<(Answer, Vec<OwnedFd>), DriverError>;

struct Worker {
    /// None in forked processes: they must not hold the worker's channel open.
    channel: Option<Channel>,
    host: Host,
    native: Sandboxes,
    gvisor: Sandboxes,
    uids: Uids,
    limits_max: Limits,
    socket: Option<SocketFile>,
    guest: OwnedFd,
    /// Held together with the server, also by every process that was forked.
    _lock: OwnedFd,
    filters: Filters,
    sockets: CountedSockets,
    /// Cache of pidfds of first processes.
    kept: HashMap<(Kind, SandboxId), OwnedFd>,
    /// Forked processes that have not exited.
    children: Children,
}

/// Serves requests until the server closes the channel.
pub(super) fn serve(
    channel: Channel,
    start: Start,
    guest: OwnedFd,
    lock: OwnedFd,
) -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("serve", "the launcher's channel");
    let mut worker = match Worker::start(&start, guest, lock) {
        Ok((worker, ready)) => {
            let ready = channel.send(&Ok::<_, Failure>(ready), &[]);
            ready.map_err(step())?;
            worker
        }
        Err(error) => {
            let failed = channel.send(&Err::<Ready, _>(Failure::from(&error)), &[]);
            return failed.map_err(step());
        }
    };
    worker.channel = Some(channel);
    while let Some((bytes, fds)) = worker.receive().map_err(step())? {
        worker.handle(&bytes, fds);
    }
    worker.native.close();
    worker.gvisor.close();
    Ok(())
}

// === impl Worker ===

impl Worker {
    fn start(start: &Start, guest: OwnedFd, lock: OwnedFd) -> Result<(Self, Ready), DriverError> {
        let sockets = CountedSockets::start()?;
        // Orphans of runsc become our children (subreaper), and are reaped.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(DriverError::step("become", "a subreaper"))?;
        // A slave mount: unmounts of the host propagate here, our mounts do not propagate to the host.
        sys::unshare(UnshareFlags::NEWNS)
            .map_err(DriverError::step("make", "a mount namespace"))?;
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", slave).map_err(DriverError::step("make slave", "/"))?;
        let filters = Filters::compile()
            .map_err(|error| DriverError::step("compile", "seccomp")(io::Error::other(error)))?;
        let host = in_order(|| Host::start(start))?;
        let native = Sandboxes::open(&start.data_dir, Kind::Native, start.server_gid)?;
        let gvisor = Sandboxes::open(&start.data_dir, Kind::Gvisor, start.server_gid)?;
        let mut weaker = host.weaker();
        // The same for both drivers.
        weaker.extend(native.weaker());
        let mut uids = Uids::default();
        for (base, dir) in native.uid_ranges().into_iter().chain(gvisor.uid_ranges()) {
            uids.keep(base, dir);
        }
        confine::refuse_calls()?;
        let ready = Ready {
            has_network: host.has_network(),
            weaker,
        };
        let worker = Self {
            channel: None,
            host,
            native,
            gvisor,
            uids,
            limits_max: start.limits_max,
            socket: start.socket.clone(),
            guest,
            _lock: lock,
            filters,
            sockets,
            kept: HashMap::new(),
            children: Children::default(),
        };
        Ok((worker, ready))
    }

    fn receive(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        self.channel
            .as_ref()
            .map_or(Ok(None), Channel::receive_bytes)
    }

    /// Does what one message asks for. Nothing that a message says ends the worker.
    fn handle(&mut self, message: &[u8], fds: Vec<OwnedFd>) {
        let mut fds = fds.into_iter();
        let (reply, file) = (fds.next(), fds.next());
        let request = match Request::parse(message, &self.limits_max) {
            Ok(request) => request,
            Err(reason) => {
                return answer(reply, &Answer::Failed(Failure::refused(reason)), &[]);
            }
        };
        // Before anything is reserved for it.
        if let Some(class) = request.class()
            && let Err(busy) = self.children.check_room(class)
        {
            return answered(reply, Err(busy));
        }
        match request {
            Request::Signal { kind, id, signal } => self.signal(kind, &id, signal),
            Request::Launch {
                kind,
                spec,
                platform,
            } => self.launch(reply, kind, spec, platform),
            Request::TryGvisor { platform } => self.try_gvisor(reply, platform),
            Request::Save { id } => self.save(reply, &id),
            Request::Restore { id, limits } => self.restore(reply, &id, &limits, &id),
            Request::LaunchFrom { id, limits, state } => self.restore(reply, &id, &limits, &state),
            Request::CopyState { id, state } => self.in_child(Class::Launch, reply, |worker| {
                worker.host.check_can_copy()?;
                let stopped = state::copy(&worker.gvisor, &id, &state)?;
                let stopped = u64::try_from(stopped.as_micros()).unwrap_or(u64::MAX);
                Ok((Answer::Copied(stopped), Vec::new()))
            }),
            Request::ForgetState { id } => self.in_child(Class::Removal, reply, |worker| {
                // Only of one that runs: the state of another is all there is of it.
                worker.living(Kind::Gvisor, &id)?;
                state::forget(&worker.gvisor, &id).map(done)
            }),
            Request::RunOn { id } => self.in_child(Class::Other, reply, |worker| {
                state::run_on(&worker.gvisor, &id).map(done)
            }),
            Request::Adopt { kind, id } => match self.is_plain(kind, &id) {
                true => answered(reply, self.adopt(kind, &id)),
                false => self.in_child(Class::Other, reply, |worker| worker.adopt_saved(&id)),
            },
            Request::List { kind, after } => {
                let ids = self.of(kind).ids(after.as_ref(), LIST_IDS_MAX);
                answered(reply, ids.map(|ids| (Answer::Ids(ids), Vec::new())));
            }
            Request::SetLimits { kind, id, limits } => {
                answered(reply, self.set_limits(kind, &id, &limits).map(done));
            }
            Request::Kill { kind, id } => {
                answered(reply, self.kill(kind, &id).map(done));
            }
            Request::Thaw { kind, id } => {
                answered(reply, self.of(kind).group(&id).thaw().map(done));
            }
            Request::Remove { kind, id } => {
                self.kept.remove(&(kind, id.clone()));
                self.in_child(Class::Removal, reply, |worker| {
                    worker.of(kind).remove(&id).map(done)
                });
            }
            Request::Freeze { kind, id } => {
                self.in_child(Class::Other, reply, |worker| {
                    worker.of(kind).group(&id).freeze().map(done)
                });
            }
            Request::OpenGate { kind, id } => {
                self.in_child(Class::Other, reply, |worker| worker.open_gate(kind, &id));
            }
            Request::UnpackLayer {
                diff_id,
                compression,
                bytes_max,
            } => self.in_child(Class::Layer, reply, |worker| {
                let missing = || DriverError::Refused("no bytes came with a layer".to_owned());
                let blob = file.ok_or_else(missing)?;
                let layers = worker.host.image_layers();
                let size = layers.unpack(blob, &diff_id, compression, bytes_max)?;
                Ok((Answer::Layer(Some(size)), Vec::new()))
            }),
            Request::FindLayer { diff_id } => {
                let size = self.host.image_layers().find(&diff_id);
                answered(reply, Ok((Answer::Layer(size), Vec::new())));
            }
            Request::ListLayers { after } => {
                let layers = self
                    .host
                    .image_layers()
                    .list(after.as_ref(), LIST_LAYERS_MAX);
                answered(reply, layers.map(|all| (Answer::Layers(all), Vec::new())));
            }
            Request::RemoveLayer { diff_id } => {
                // Gone for whoever asks next; what takes long comes after that.
                let trash = self.host.image_layers().set_aside(&diff_id);
                self.in_child(Class::Layer, reply, |worker| {
                    worker.host.image_layers().discard(trash?).map(done)
                });
            }
            Request::RemoveSocket => {
                let removed = self.socket.as_ref().map_or(Ok(()), SocketFile::remove);
                let removed = removed.map_err(DriverError::step("remove", "the server's socket"));
                answered(reply, removed.map(done));
            }
        }
    }

    fn of(&self, kind: Kind) -> &Sandboxes {
        match kind {
            Kind::Native => &self.native,
            Kind::Gvisor => &self.gvisor,
        }
    }

    /// Reserves the id and a uid range, which is state of the worker; a forked process does the rest.
    fn launch(
        &mut self,
        reply: Option<OwnedFd>,
        kind: Kind,
        spec: SandboxSpec,
        platform: Platform,
    ) {
        let uid_base = match self.reserve(kind, &spec.id) {
            Ok(base) => base,
            Err(error) => return answered(reply, Err(error)),
        };
        self.in_child(Class::Launch, reply, move |worker| {
            let sandboxes = worker.of(kind);
            let started =
                sandboxes.launch(&worker.host, &spec, uid_base, |prepared| match kind {
                    Kind::Native => {
                        let confinement = Confinement {
                            filters: &worker.filters,
                            sockets: &worker.sockets,
                        };
                        let (host, guest) = (&worker.host, &worker.guest);
                        native::launch::start(host, &spec, prepared, guest, confinement)
                    }
                    Kind::Gvisor => {
                        let host = &worker.host;
                        let runsc = gvisor::launch::runsc(host)?;
                        gvisor::launch::start(
                            host, sandboxes, &spec, prepared, &runsc, platform, None,
                        )
                    }
                })?;
            let made = sandbox(sandboxes, &spec.id, started.pidfd);
            Ok(worker.with_gate(made, kind, &spec.id))
        });
    }

    fn try_gvisor(&mut self, reply: Option<OwnedFd>, platform: Platform) {
        let step = DriverError::step("copy", "the guest");
        if let Err(error) = gvisor::launch::write_guest(&self.guest, self.gvisor.dir()) {
            return answered(reply, Err(step(error)));
        }
        if gvisor::launch::worked_before(&self.host, &self.gvisor, platform) {
            return answered(reply, Ok(done(())));
        }
        let spec = gvisor::launch::trial();
        let uid_base = match self.reserve(Kind::Gvisor, &spec.id) {
            Ok(base) => base,
            Err(error) => return answered(reply, Err(error)),
        };
        self.in_child(Class::Launch, reply, move |worker| {
            let (host, sandboxes) = (&worker.host, &worker.gvisor);
            let tried = sandboxes.try_out(host, &spec, uid_base, |prepared| {
                gvisor::launch::try_out(host, sandboxes, &spec, prepared, platform)
            });
            tried.map(done)
        });
    }

    /// Its uid range stays taken by the state.
    fn save(&mut self, reply: Option<OwnedFd>, id: &SandboxId) {
        let record = match self.living(Kind::Gvisor, id) {
            Ok(record) => record,
            Err(error) => return answered(reply, Err(error)),
        };
        self.kept.remove(&(Kind::Gvisor, id.clone()));
        let state = state::state_dir(&self.gvisor, id);
        self.uids.keep(record.uid_base, state);
        self.in_child(Class::Launch, reply, |worker| {
            state::save(&worker.gvisor, id).map(done)
        });
    }

    /// A launch from the copy of a state: of the sandbox itself, which keeps its uid range, or of another.
    fn restore(
        &mut self,
        reply: Option<OwnedFd>,
        id: &SandboxId,
        limits: &Limits,
        state: &SandboxId,
    ) {
        let Some(saved) = Saved::read(&self.gvisor, state) else {
            let error = io::Error::from(io::ErrorKind::NotFound);
            let step = DriverError::step("find", format!("the state of {state}"));
            return answered(reply, Err(step(error)));
        };
        let reserved = match id == state {
            true => self.gvisor.reserve(id).map(|dir| {
                self.uids.keep(saved.uid_base, dir);
                saved.uid_base
            }),
            false => self.reserve(Kind::Gvisor, id),
        };
        let uid_base = match reserved {
            Ok(base) => base,
            Err(error) => return answered(reply, Err(error)),
        };
        self.in_child(Class::Launch, reply, |worker| {
            let (host, sandboxes) = (&worker.host, &worker.gvisor);
            let from = gvisor::launch::FromState {
                saved: &saved,
                state,
                id,
                limits,
                uid_base,
            };
            let (started, lost) = gvisor::launch::restore(host, sandboxes, &from)?;
            let made = sandbox(sandboxes, id, started.pidfd);
            match worker.with_gate(made, Kind::Gvisor, id) {
                (Answer::Sandbox(passed), fds) => Ok((Answer::Restored(passed, lost), fds)),
                other => Ok(other),
            }
        });
    }

    /// Whether it was neither saved, nor about to be.
    fn is_plain(&self, kind: Kind, id: &SandboxId) -> bool {
        if kind != Kind::Gvisor {
            return true;
        }
        let sandboxes = self.of(kind);
        !state::exists(sandboxes, id) && !crate::guest::is_refused(&sandboxes.socket(id))
    }

    /// Adopts a sandbox that an earlier server was about to save, or has saved or restored.
    fn adopt_saved(&self, id: &SandboxId) -> Answered {
        let sandboxes = &self.gvisor;
        let Some((_, init)) = sandboxes.find(id)? else {
            return match state::finish(sandboxes, id)? {
                true => Ok((Answer::Saved, Vec::new())),
                false => Ok((Answer::Gone, Vec::new())),
            };
        };
        // One that was restored has more than its state.
        state::forget(sandboxes, id)?;
        sandboxes.let_server_connect(id)?;
        let _ = rustix::process::pidfd_send_signal(&init, Signal::CONT);
        state::run_on(sandboxes, id)?;
        Ok(sandbox(sandboxes, id, init))
    }

    fn reserve(&mut self, kind: Kind, id: &SandboxId) -> Result<u32, DriverError> {
        let dir = self.of(kind).reserve(id)?;
        self.uids.take(&dir).ok_or_else(|| {
            // The directory is empty: no other resource was made yet.
            let _ = fs::remove_dir(&dir);
            DriverError::Exhausted(
                "all uid ranges for sandboxes are in use: wait for sessions to end".to_owned(),
            )
        })
    }

    fn adopt(&mut self, kind: Kind, id: &SandboxId) -> Answered {
        let sandboxes = self.of(kind);
        let Some((_, init)) = sandboxes.find(id)? else {
            return Ok((Answer::Gone, Vec::new()));
        };
        sandboxes.let_server_connect(id)?;
        if kind.has_kernel() {
            // An earlier server may have left it in idle stop.
            let _ = rustix::process::pidfd_send_signal(&init, Signal::CONT);
        }
        Ok(sandbox(sandboxes, id, init))
    }

    /// Only to a separate kernel: the processes of native sandboxes are not signalled.
    fn signal(&mut self, kind: Kind, id: &SandboxId, signal: IdleSignal) {
        if !kind.has_kernel() {
            return;
        }
        let signal = match signal {
            IdleSignal::Stop => Signal::STOP,
            IdleSignal::Continue => Signal::CONT,
        };
        if let Ok(init) = self.init(kind, id) {
            // A dead process needs no signal.
            let _ = rustix::process::pidfd_send_signal(init, signal);
        }
    }

    /// Kills a sandbox whose guest frees no memory. Not a frozen one: its usage does not grow, and its guest
    /// is frozen too.
    fn kill(&mut self, kind: Kind, id: &SandboxId) -> Result<(), DriverError> {
        if self.of(kind).group(id).stands_still() {
            return Err(DriverError::Unusable(format!("{id} is frozen")));
        }
        match rustix::process::pidfd_send_signal(self.init(kind, id)?, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => Ok(()),
            done => done.map_err(DriverError::step("kill", id.to_string())),
        }
    }

    fn set_limits(&self, kind: Kind, id: &SandboxId, limits: &Limits) -> Result<(), DriverError> {
        let sandboxes = self.of(kind);
        let record = self.living(kind, id)?;
        sandboxes.set_limits(id, limits)?;
        if kind.has_kernel() {
            // The sentry charges shared memory as memory; the size is only what `df` shows.
            return Ok(());
        }
        shm::resize(record.pid, limits).map_err(DriverError::step(
            "resize",
            format!("the shared memory of {id}"),
        ))
    }

    /// In a forked process, which enters the namespace and ends there.
    fn open_gate(&self, kind: Kind, id: &SandboxId) -> Answered {
        let step = || DriverError::step::<io::Error>("open", format!("the network of {id}"));
        let record = self.living(kind, id)?;
        let namespace = fs::File::open(format!("/proc/{}/ns/net", record.pid)).map_err(step())?;
        // The pid may have been another process's by then.
        self.living(kind, id)?;
        let sockets = Sockets::open_in(namespace.as_fd()).map_err(step())?;
        Ok((Answer::Gate, sockets.into_descriptors().into()))
    }

    /// Adds the gate's sockets to the answer about a new sandbox: this process has nothing else to do in
    /// its own network namespace. When they cannot be opened, the server's next request returns the error.
    fn with_gate(
        &self,
        (answer, mut fds): (Answer, Vec<OwnedFd>),
        kind: Kind,
        id: &SandboxId,
    ) -> (Answer, Vec<OwnedFd>) {
        let Answer::Sandbox(passed) = answer else {
            return (answer, fds);
        };
        let opened = match self.host.has_network() {
            true => self.open_gate(kind, id).ok(),
            false => None,
        };
        let gate = opened.is_some();
        fds.extend(opened.into_iter().flat_map(|(_, sockets)| sockets));
        let answer = Answer::Sandbox(Passed { gate, ..passed });
        (answer, fds)
    }

    fn living(&self, kind: Kind, id: &SandboxId) -> Result<Record, DriverError> {
        let found = self.of(kind).find(id)?;
        let gone =
            || DriverError::step("find", id.to_string())(io::Error::from(io::ErrorKind::NotFound));
        found.map(|(record, _)| record).ok_or_else(gone)
    }

    /// The first process of a sandbox, from the cache if it is there.
    fn init(&mut self, kind: Kind, id: &SandboxId) -> Result<BorrowedFd<'_>, DriverError> {
        let key = (kind, id.clone());
        if !self.kept.contains_key(&key) {
            let gone = || {
                DriverError::step("find", id.to_string())(io::Error::from(io::ErrorKind::NotFound))
            };
            let (_, init) = self.of(kind).find(id)?.ok_or_else(gone)?;
            if self.kept.len() >= KEPT_MAX {
                self.kept.clear();
            }
            self.kept.insert(key.clone(), init);
        }
        Ok(self.kept[&key].as_fd())
    }

    /// Forks a process that runs `work`, answers, and exits. The caller has checked the limit.
    fn in_child(
        &mut self,
        class: Class,
        reply: Option<OwnedFd>,
        work: impl FnOnce(&Self) -> Answered,
    ) {
        match sys::fork_into(0, None) {
            Ok(Fork::Parent { pidfd, .. }) => self.children.add(class, pidfd),
            Ok(Fork::Child) => {
                self.channel = None;
                // The worker ignores SIGCHLD; programs that this process runs need it.
                sys::reset_signals();
                answered(reply, work(self));
                sys::exit_now(0)
            }
            Err(error) => answered(reply, Err(DriverError::step("fork", "the launcher")(error))),
        }
    }
}

/// Runs `work` with the signals that programs are started and waited for with.
fn in_order<T>(work: impl FnOnce() -> T) -> T {
    sys::reset_signals();
    let done = work();
    sys::ignore_children();
    done
}

fn sandbox(sandboxes: &Sandboxes, id: &SandboxId, init: OwnedFd) -> (Answer, Vec<OwnedFd>) {
    let group = sandboxes.group(id);
    let counters = group.counters();
    let memory_use = group.memory_use();
    let cpu_time = group.cpu_time();
    let sandbox = Answer::Sandbox(Passed {
        memory_events: counters.memory.is_some(),
        pids_events: counters.pids.is_some(),
        memory_use: memory_use.is_some(),
        cpu_time: cpu_time.is_some(),
        gate: false,
    });
    let (usage, stat) = memory_use.unzip();
    let files = [counters.memory, counters.pids, usage, stat, cpu_time]
        .into_iter()
        .flatten()
        .map(OwnedFd::from);
    (sandbox, std::iter::once(init).chain(files).collect())
}

fn done((): ()) -> (Answer, Vec<OwnedFd>) {
    (Answer::Done, Vec::new())
}

fn answered(reply: Option<OwnedFd>, answered: Answered) {
    match answered {
        Ok((said, fds)) => {
            let fds: Vec<_> = fds.iter().map(OwnedFd::as_fd).collect();
            answer(reply, &said, &fds);
        }
        Err(error) => answer(reply, &Answer::Failed(Failure::from(&error)), &[]),
    }
}

/// A server that has closed its answer socket is ignored.
fn answer(reply: Option<OwnedFd>, answer: &Answer, fds: &[BorrowedFd<'_>]) {
    if let Some(reply) = reply {
        let _ = Channel::from(reply).send_now(answer, fds);
    }
}
