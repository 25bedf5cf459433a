//! The worker: the launcher's process that does what the server asks for. One thread; what takes
//! long is done by a process that it forks.

use super::channel::Channel;
use super::request::{Answer, IdleSignal, LIST_IDS_MAX, Ready, Request, SocketFile, Start};
use super::{Failure, confine};
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

/// First processes whose descriptors are kept; they are found by their records when it is full.
const KEPT_MAX: usize = 4096;

/// An answer, and the descriptors that go along.
type Answered = Result<(Answer, Vec<OwnedFd>), DriverError>;

struct Worker {
    /// None in processes that were forked: the server shall not take them for the worker.
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
    /// First processes of sandboxes that were looked for before.
    kept: HashMap<(Kind, SandboxId), OwnedFd>,
}

/// Serves the server until it is gone.
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
        worker.handle(&bytes, fds.into_iter().next());
    }
    worker.native.close();
    worker.gvisor.close();
    Ok(())
}

// === impl Worker ===

impl Worker {
    fn start(start: &Start, guest: OwnedFd, lock: OwnedFd) -> Result<(Self, Ready), DriverError> {
        let sockets = CountedSockets::start()?;
        // What runsc leaves running becomes our child when runsc ends, and so is reaped.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(DriverError::step("become", "a subreaper"))?;
        // Sees unmounts of the host, shows it none of ours.
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
        };
        Ok((worker, ready))
    }

    fn receive(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        self.channel
            .as_ref()
            .map_or(Ok(None), Channel::receive_bytes)
    }

    /// Does what one message asks for. Nothing that a message says ends the worker.
    fn handle(&mut self, message: &[u8], reply: Option<OwnedFd>) {
        let request = match Request::parse(message, &self.limits_max) {
            Ok(request) => request,
            Err(reason) => {
                return answer(reply, &Answer::Failed(Failure::refused(reason)), &[]);
            }
        };
        match request {
            Request::Signal { kind, id, signal } => self.signal(kind, &id, signal),
            Request::Launch {
                kind,
                spec,
                platform,
            } => self.launch(reply, kind, spec, platform),
            Request::TryGvisor { platform } => self.try_gvisor(reply, platform),
            Request::Adopt { kind, id } => answered(reply, self.adopt(kind, &id)),
            Request::List { kind, after } => {
                let ids = self.of(kind).ids(after.as_ref(), LIST_IDS_MAX);
                answered(reply, ids.map(|ids| (Answer::Ids(ids), Vec::new())));
            }
            Request::SetLimits { kind, id, limits } => {
                answered(reply, self.set_limits(kind, &id, &limits).map(done));
            }
            Request::Thaw { kind, id } => {
                answered(reply, self.of(kind).group(&id).thaw().map(done));
            }
            Request::Remove { kind, id } => {
                self.kept.remove(&(kind, id.clone()));
                self.in_child(reply, |worker| worker.of(kind).remove(&id).map(done));
            }
            Request::Freeze { kind, id } => {
                self.in_child(reply, |worker| {
                    worker.of(kind).group(&id).freeze().map(done)
                });
            }
            Request::OpenGate { kind, id } => {
                self.in_child(reply, |worker| worker.open_gate(kind, &id));
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

    /// Takes the id and a uid range, which needs the worker's own memory; a child does the rest.
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
        self.in_child(reply, move |worker| {
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
                        gvisor::launch::start(&worker.host, sandboxes, &spec, prepared, platform)
                    }
                })?;
            Ok(sandbox(sandboxes, &spec.id, started.pidfd))
        });
    }

    fn try_gvisor(&mut self, reply: Option<OwnedFd>, platform: Platform) {
        let step = DriverError::step("copy", "the guest");
        if let Err(error) = gvisor::launch::write_guest(&self.guest, self.gvisor.dir()) {
            return answered(reply, Err(step(error)));
        }
        if gvisor::launch::worked_before(&self.gvisor, platform) {
            return answered(reply, Ok(done(())));
        }
        let spec = gvisor::launch::trial();
        let uid_base = match self.reserve(Kind::Gvisor, &spec.id) {
            Ok(base) => base,
            Err(error) => return answered(reply, Err(error)),
        };
        self.in_child(reply, move |worker| {
            let (host, sandboxes) = (&worker.host, &worker.gvisor);
            let tried = sandboxes.try_out(host, &spec, uid_base, |prepared| {
                gvisor::launch::try_out(host, sandboxes, &spec, prepared, platform)
            });
            tried.map(done)
        });
    }

    fn reserve(&mut self, kind: Kind, id: &SandboxId) -> Result<u32, DriverError> {
        let dir = self.of(kind).reserve(id)?;
        self.uids.take(&dir).ok_or_else(|| {
            // It is empty: nothing was made yet.
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
            // The server before may have left it stopped.
            let _ = rustix::process::pidfd_send_signal(&init, Signal::CONT);
        }
        Ok(sandbox(sandboxes, id, init))
    }

    /// To a separate kernel only: the processes of other sandboxes are the host's.
    fn signal(&mut self, kind: Kind, id: &SandboxId, signal: IdleSignal) {
        if !kind.has_kernel() {
            return;
        }
        let signal = match signal {
            IdleSignal::Stop => Signal::STOP,
            IdleSignal::Continue => Signal::CONT,
        };
        if let Ok(init) = self.init(kind, id) {
            // One that is dead needs no signal.
            let _ = rustix::process::pidfd_send_signal(init, signal);
        }
    }

    fn set_limits(&self, kind: Kind, id: &SandboxId, limits: &Limits) -> Result<(), DriverError> {
        let sandboxes = self.of(kind);
        let record = self.living(kind, id)?;
        sandboxes.group(id).set_limits(&kind.host_limits(limits))?;
        if kind.has_kernel() {
            // Its kernel counts shared memory as memory; the size is only what `df` says.
            return Ok(());
        }
        shm::resize(record.pid, limits).map_err(DriverError::step(
            "resize",
            format!("the shared memory of {id}"),
        ))
    }

    /// In a process of its own, which goes into the namespace and ends there.
    fn open_gate(&self, kind: Kind, id: &SandboxId) -> Answered {
        let step = || DriverError::step::<io::Error>("open", format!("the network of {id}"));
        let record = self.living(kind, id)?;
        let namespace = fs::File::open(format!("/proc/{}/ns/net", record.pid)).map_err(step())?;
        // The pid may have been another process's by then.
        self.living(kind, id)?;
        let sockets = Sockets::open_in(namespace.as_fd()).map_err(step())?;
        Ok((Answer::Gate, sockets.into_descriptors().into()))
    }

    fn living(&self, kind: Kind, id: &SandboxId) -> Result<Record, DriverError> {
        let found = self.of(kind).find(id)?;
        let gone =
            || DriverError::step("find", id.to_string())(io::Error::from(io::ErrorKind::NotFound));
        found.map(|(record, _)| record).ok_or_else(gone)
    }

    /// The first process of a sandbox, kept from the last time.
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

    /// Forks a process that does `work`, answers, and ends.
    fn in_child(&mut self, reply: Option<OwnedFd>, work: impl FnOnce(&Self) -> Answered) {
        match sys::fork_into(0, None) {
            Ok(Fork::Parent { .. }) => {}
            Ok(Fork::Child) => {
                self.channel = None;
                // Children are ignored by the worker, and waited for by what this one runs.
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
    let counters = sandboxes.group(id).counters();
    let sandbox = Answer::Sandbox {
        memory_events: counters.memory.is_some(),
        pids_events: counters.pids.is_some(),
    };
    let files = [counters.memory, counters.pids]
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

/// A server that does not wait for its answer any more is none of our business.
fn answer(reply: Option<OwnedFd>, answer: &Answer, fds: &[BorrowedFd<'_>]) {
    if let Some(reply) = reply {
        let _ = Channel::from(reply).send_now(answer, fds);
    }
}
