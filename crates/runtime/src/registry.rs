//! Process table: the running commands, their ids, their limit, and how to signal them and write to their stdin.
//!
//! Clients know a command by an id of ours, not by its PID: the kernel may have reused the PID by the time it is used.

use crate::agent::Failure;
use k8e_wire::proto::{ErrorCode, input::Input};
use rustix::process::{Pid, Signal};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// The running commands, and the limit of their number.
pub(crate) struct Registry {
    permits: Arc<Semaphore>,
    max: usize,
    next: AtomicI32,
    running: Mutex<HashMap<i32, Arc<Process>>>,
    ended: Notify,
}

/// Registration of a command that runs or is being started. Dropping it removes the command from the table.
pub(crate) struct Running {
    registry: Arc<Registry>,
    pub(crate) process: Arc<Process>,
    _permit: OwnedSemaphorePermit,
}

/// One command: its id, and its PID and stdin once it has started.
pub(crate) struct Process {
    pub(crate) id: i32,
    kernel: OnceLock<Kernel>,
    stdin: OnceLock<Stdin>,
}

/// Identity of a process: a PID may be reused, a PID with a start time is not.
struct Kernel {
    pid: Pid,
    /// In clock ticks since boot.
    start_time: Option<u64>,
}

/// Stdin of a command.
pub(crate) enum Stdin {
    /// A pipe, through the task that owns the guest call.
    Pipe {
        writes: mpsc::Sender<StdinWrite>,
        ended: AtomicBool,
    },
    /// The terminal of the guest with this id.
    Terminal(String),
}

/// Bytes for the stdin of a command, or its end, and a channel to confirm that the guest has them.
pub(crate) type StdinWrite = (Input, oneshot::Sender<()>);

// === impl Registry ===

impl Registry {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(max)),
            max,
            next: AtomicI32::new(1),
            running: Mutex::default(),
            ended: Notify::new(),
        }
    }

    /// Registers a command. Fails when the limit is reached.
    pub(crate) fn admit(this: &Arc<Self>) -> Result<Running, Failure> {
        let Ok(permit) = Arc::clone(&this.permits).try_acquire_owned() else {
            let max = this.max;
            let message = format!(
                "too many commands: {max} are running, which is the limit (-max-processes); try again when one has ended"
            );
            return Err(Failure::new(ErrorCode::Exhausted, message));
        };
        let mut running = this.map();
        // After two billion commands the ids start again at 1.
        let id = loop {
            let id = this.next.fetch_add(1, Ordering::Relaxed) & i32::MAX;
            if id > 0 && !running.contains_key(&id) {
                break id;
            }
        };
        let process = Arc::new(Process {
            id,
            kernel: OnceLock::new(),
            stdin: OnceLock::new(),
        });
        running.insert(id, Arc::clone(&process));
        drop(running);
        Ok(Running {
            registry: Arc::clone(this),
            process,
            _permit: permit,
        })
    }

    /// The command with this id.
    pub(crate) fn get(&self, id: i32) -> Result<Arc<Process>, Failure> {
        let found = self.map().get(&id).cloned();
        found.ok_or_else(|| {
            let message = format!("there is no process {id}, or it has ended");
            Failure::new(ErrorCode::NotFound, message)
        })
    }

    /// Sends a signal to every command.
    pub(crate) fn signal_all(&self, signal: Signal) {
        for process in self.map().values() {
            process.signal(signal);
        }
    }

    /// Resolves when no command is running.
    pub(crate) async fn drained(&self) {
        loop {
            let ended = self.ended.notified();
            if self.map().is_empty() {
                return;
            }
            ended.await;
        }
    }

    fn map(&self) -> MutexGuard<'_, HashMap<i32, Arc<Process>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.registry.map().remove(&self.process.id);
        self.registry.ended.notify_one();
    }
}

// === impl Process ===

impl Process {
    /// Records the PID of the started command.
    pub(crate) fn set_pid(&self, pid: i32) {
        // Never PID 1: as a process group it would be everything.
        if let Some(pid) = Pid::from_raw(pid).filter(|pid| !pid.is_init()) {
            let start_time = start_time(pid);
            let _ = self.kernel.set(Kernel { pid, start_time });
        }
    }

    pub(crate) fn set_stdin(&self, stdin: Stdin) {
        let _ = self.stdin.set(stdin);
    }

    /// `None` for a command without stdin.
    pub(crate) fn stdin(&self) -> Option<&Stdin> {
        self.stdin.get()
    }

    /// Sends a signal to its process group, if the process still exists.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(kernel) = self.kernel.get()
            && start_time(kernel.pid) == kernel.start_time
        {
            let _ = rustix::process::kill_process_group(kernel.pid, signal);
        }
    }
}

/// Start time of a process, in clock ticks since boot (`/proc/<pid>/stat`); `None` if it does not exist.
fn start_time(pid: Pid) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The command name in parentheses may contain anything; the start time is the 20th field after it.
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields = std::str::from_utf8(&stat[after..]).ok()?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_released_and_ids_are_not_reused() {
        let registry = Arc::new(Registry::new(2));
        let first = Registry::admit(&registry).unwrap();
        let _second = Registry::admit(&registry).unwrap();
        let full = Registry::admit(&registry).map(drop).unwrap_err();
        assert_eq!(full.code, ErrorCode::Exhausted);
        let id = first.process.id;
        assert!(registry.get(id).is_ok());
        drop(first);
        assert!(registry.get(id).is_err());
        assert_ne!(Registry::admit(&registry).unwrap().process.id, id);
    }

    #[test]
    fn the_start_time_of_this_process_is_stable() {
        let own = rustix::process::getpid();
        assert!(start_time(own).is_some_and(|ticks| ticks > 0));
        assert_eq!(start_time(own), start_time(own));
    }
}
