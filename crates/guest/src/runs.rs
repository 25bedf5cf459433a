//! Background runs: commands that outlive the connection that started them.
//!
//! The guest is its own host for these: a run is an ordinary `Exec` call over a pair of sockets in
//! this process. Its *keeper* task has the host's end, keeps the beginning of each stream and the exit
//! status, and closes its end when the run is to be ended, which is how every call is
//! cancelled. A client that attaches reads what is kept, from the beginning.

use crate::error::Error;
use crate::{Guest, exec};
use bytes::Bytes;
use k8e_wire::proto::{
    AttachRun, Done, EndRun, Exec, Exited, ForgetRun, StartRun, Started, reply::Reply,
    request::Call,
};
use k8e_wire::{CHUNK_BYTES, GuestEnd, HostEnd, ReplySink};
use std::collections::HashMap;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::Instant;

/// Limit of runs, ended ones included. The engine has far fewer at once and forgets each when it has
/// its output; with all of them full, this is 128 MiB of the sandbox's memory.
const RUNS_MAX: usize = 64;

/// Bytes kept of each stream of a run.
const KEPT_BYTES_MAX: u64 = 1024 * 1024;

/// Bytes of the longest id of a run or a terminal. The host's have 25.
const ID_BYTES_MAX: usize = 64;

/// Runs by id.
#[derive(Default)]
pub(crate) struct Runs(Mutex<HashMap<String, Arc<Run>>>);

struct Run {
    state: Mutex<State>,
    /// Notified when the state changes.
    changed: watch::Sender<()>,
    /// Set to have the keeper cancel it.
    ending: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    /// Process id of the command; 0 until it has started.
    pid: i32,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    exited: Option<Exited>,
}

/// A run that has not started yet; removed on drop.
struct Starting<'a> {
    runs: &'a Runs,
    run: Arc<Run>,
    id: &'a str,
    started: bool,
}

/// Starts a run, then goes on as [`attach`].
pub(crate) async fn start(
    guest: &Arc<Guest>,
    replies: &mut ReplySink,
    request: StartRun,
) -> Result<Reply, Error> {
    let call = checked(request.exec)?;
    let run = guest.runs.add(&request.id)?;
    let mut starting = Starting {
        runs: &guest.runs,
        run: Arc::clone(&run),
        id: &request.id,
        started: false,
    };
    let failed = || Error::os::<std::io::Error>("make sockets for", request.id.as_bytes());
    let (ours, theirs) = StdStream::pair().map_err(failed())?;
    theirs.set_nonblocking(true).map_err(failed())?;
    let theirs = UnixStream::from_std(theirs).map_err(failed())?;
    let begin = Instant::now();
    tokio::spawn(execute(Arc::clone(guest), theirs));
    let mut host = HostEnd::call(ours, Call::Exec(call)).await?;
    let first = host.replies.next().await?;
    let Reply::Started(Started { pid }) = first else {
        // The error why it did not start.
        return Ok(first);
    };
    run.state().pid = pid;
    starting.started = true;
    tokio::spawn(keep(Arc::clone(&run), host, begin));
    follow(&run, replies, false).await
}

/// Sends the kept and new output of a run; the final reply is its exit status.
pub(crate) async fn attach(
    guest: &Guest,
    replies: &mut ReplySink,
    request: AttachRun,
) -> Result<Reply, Error> {
    let run = guest.runs.get(&request.id)?;
    follow(&run, replies, request.now).await
}

async fn follow(run: &Run, replies: &mut ReplySink, now: bool) -> Result<Reply, Error> {
    let mut changed = run.changed.subscribe();
    let pid = run.state().pid;
    replies.send(Reply::Started(Started { pid })).await?;
    let (mut stdout_sent, mut stderr_sent) = (0, 0);
    loop {
        changed.borrow_and_update();
        // The exit status is checked first: output from before it was kept by then.
        let exited = run.state().exited;
        loop {
            let data = chunk(&run.state().stdout, &mut stdout_sent);
            let Some(data) = data else { break };
            replies.send(Reply::Stdout(data)).await?;
        }
        loop {
            let data = chunk(&run.state().stderr, &mut stderr_sent);
            let Some(data) = data else { break };
            replies.send(Reply::Stderr(data)).await?;
        }
        if let Some(exited) = exited {
            return Ok(Reply::Exited(exited));
        }
        if now {
            return Ok(Reply::Done(Done::default()));
        }
        // The sender is in the run, which is alive here.
        changed.changed().await.ok();
    }
}

/// Ends a run and kills its process tree.
pub(crate) async fn end(guest: &Guest, request: EndRun) -> Result<Reply, Error> {
    guest.runs.get(&request.id)?.end().await;
    Ok(Reply::Done(Done::default()))
}

/// Ends a run if it has not ended, and removes it.
pub(crate) async fn forget(guest: &Guest, request: ForgetRun) -> Result<Reply, Error> {
    guest.runs.get(&request.id)?.end().await;
    guest.runs.remove(&request.id);
    Ok(Reply::Done(Done::default()))
}

/// Checks an id from the host.
pub(crate) fn check_id(id: &str) -> Result<(), Error> {
    match id.len() {
        1..=ID_BYTES_MAX => Ok(()),
        _ => Err(Error::Invalid(format!(
            "an id of {} bytes: use 1 to {ID_BYTES_MAX}",
            id.len()
        ))),
    }
}

// === impl Runs ===

impl Runs {
    fn add(&self, id: &str) -> Result<Arc<Run>, Error> {
        check_id(id)?;
        let mut runs = self.map();
        if runs.contains_key(id) {
            return Err(Error::Exists(format!("run {id:?}")));
        }
        if runs.len() >= RUNS_MAX {
            return Err(Error::Exhausted(format!(
                "{RUNS_MAX} background runs are kept, the maximum of a sandbox: forget ended ones"
            )));
        }
        let run = Arc::new(Run {
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            ending: watch::Sender::new(false),
        });
        runs.insert(id.to_owned(), Arc::clone(&run));
        Ok(run)
    }

    fn get(&self, id: &str) -> Result<Arc<Run>, Error> {
        let found = self.map().get(id).cloned();
        found.ok_or_else(|| Error::NotFound(format!("run {id:?}")))
    }

    fn remove(&self, id: &str) {
        self.map().remove(id);
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Arc<Run>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Run ===

impl Run {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.send_replace(());
    }

    /// Cancels it, and waits for its end. Completes also when the caller is dropped.
    async fn end(&self) {
        self.ending.send_replace(true);
        let mut changed = self.changed.subscribe();
        while self.state().exited.is_none() {
            changed.changed().await.ok();
        }
    }
}

// === impl Starting ===

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        if !self.started {
            self.runs.remove(self.id);
            // Another call may wait for its end already, and only this can notify it.
            self.run
                .change(|state| state.exited = Some(Exited::default()));
        }
    }
}

/// The guest's side of the call.
async fn execute(guest: Arc<Guest>, stream: UnixStream) {
    let mut end = GuestEnd::new(stream);
    let Ok(Some(Call::Exec(call))) = end.requests.request().await else {
        return;
    };
    // For a background run `Started` is not delayed.
    let held = Duration::ZERO;
    let last = match Box::pin(exec::exec(&guest, &mut end, call, held)).await {
        Ok(last) => last,
        Err(Error::Cancelled | Error::Wire(_)) => return,
        Err(error) => Reply::Error(error.to_proto()),
    };
    let _ = end.replies.send(last).await;
}

/// The host's side of the call, from when the command runs to its end.
async fn keep(run: Arc<Run>, host: HostEnd, begin: Instant) {
    let HostEnd {
        mut replies,
        inputs,
    } = host;
    let mut inputs = Some(inputs);
    let mut ending = run.ending.subscribe();
    let exited = loop {
        let reply = tokio::select! {
            reply = replies.next() => reply,
            _ = ending.wait_for(|ending| *ending), if inputs.is_some() => {
                // From now on it is killed; the connection ends when it is gone.
                inputs = None;
                continue;
            }
        };
        match reply {
            Ok(Reply::Stdout(data)) => run.change(|state| state.stdout.extend_from_slice(&data)),
            Ok(Reply::Stderr(data)) => run.change(|state| state.stderr.extend_from_slice(&data)),
            Ok(Reply::Exited(exited)) => break exited,
            Ok(_) | Err(_) => break killed(&run.state(), begin),
        }
    };
    run.change(|state| state.exited = Some(exited));
}

/// Exit status of a cancelled run.
fn killed(state: &State, begin: Instant) -> Exited {
    Exited {
        exit_code: 128 + libc::SIGKILL,
        signal: libc::SIGKILL,
        duration_us: u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX),
        stdout_bytes: state.stdout.len() as u64,
        stderr_bytes: state.stderr.len() as u64,
        ..Exited::default()
    }
}

fn checked(exec: Option<Exec>) -> Result<Exec, Error> {
    let Some(exec) = exec else {
        return Err(Error::Invalid("no command to run".to_owned()));
    };
    if exec.stdin {
        let what = "a background run takes no standard input";
        return Err(Error::Invalid(what.to_owned()));
    }
    let output_bytes_max = match exec.output_bytes_max {
        0 => KEPT_BYTES_MAX,
        asked => asked.min(KEPT_BYTES_MAX),
    };
    Ok(Exec {
        output_bytes_max,
        ..exec
    })
}

/// The next unsent part of a stream, if any.
fn chunk(kept: &[u8], sent: &mut usize) -> Option<Bytes> {
    let rest = &kept[*sent..];
    let data = &rest[..rest.len().min(CHUNK_BYTES)];
    *sent += data.len();
    (!data.is_empty()).then(|| Bytes::copy_from_slice(data))
}
