//! The commands that run: how many, under which numbers, and how to reach them.
//!
//! Clients know a command by a number of ours. A process id of the kernel's could be anybody's by the
//! time it is used.

use crate::agent::Failure;
use k8e_wire::proto::{ErrorCode, input::Input};
use rustix::process::{Pid, Signal};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// All commands.
pub(crate) struct Registry {
    room: Arc<Semaphore>,
    max: usize,
    next: AtomicI32,
    running: Mutex<HashMap<i32, Arc<Process>>>,
    ended: Notify,
}

/// A command that runs, or is about to. Dropped, it is forgotten.
pub(crate) struct Running {
    registry: Arc<Registry>,
    pub(crate) process: Arc<Process>,
    _permit: OwnedSemaphorePermit,
}

/// A command.
pub(crate) struct Process {
    pub(crate) id: i32,
    kernel: OnceLock<Kernel>,
    stdin: OnceLock<Stdin>,
}

/// What the kernel knows it by.
struct Kernel {
    pid: Pid,
    /// When it was born, which tells it from a later one with that process id.
    born: Option<u64>,
}

/// How it gets its input.
pub(crate) enum Stdin {
    /// Through the task that has the guest's call.
    Pipe {
        feed: mpsc::Sender<Feed>,
        ended: AtomicBool,
    },
    /// Typed into the guest's terminal with this id.
    Terminal(String),
}

/// Something for a command to read, and where to tell that it was taken.
pub(crate) type Feed = (Input, oneshot::Sender<()>);

// === impl Registry ===

impl Registry {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            room: Arc::new(Semaphore::new(max)),
            max,
            next: AtomicI32::new(1),
            running: Mutex::default(),
            ended: Notify::new(),
        }
    }

    /// A place for one more.
    pub(crate) fn admit(this: &Arc<Self>) -> Result<Running, Failure> {
        let Ok(permit) = Arc::clone(&this.room).try_acquire_owned() else {
            let max = this.max;
            let message = format!(
                "{max} commands run, which is all that may at once: try again when one has ended"
            );
            return Err(Failure::new(ErrorCode::Exhausted, message));
        };
        let mut running = this.map();
        // After two billion commands the numbers begin again.
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

    /// The command with that number.
    pub(crate) fn get(&self, id: i32) -> Result<Arc<Process>, Failure> {
        let found = self.map().get(&id).cloned();
        found.ok_or_else(|| {
            let message = format!("there is no process {id}, or it has ended");
            Failure::new(ErrorCode::NotFound, message)
        })
    }

    /// Sends a signal to all.
    pub(crate) fn signal_all(&self, signal: Signal) {
        for process in self.map().values() {
            process.signal(signal);
        }
    }

    /// Resolves when none is left.
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
    /// It started, as this process of the kernel's.
    pub(crate) fn set_pid(&self, pid: i32) {
        // Not 1: that is us, or all there is.
        if let Some(pid) = Pid::from_raw(pid).filter(|pid| !pid.is_init()) {
            let born = birth(pid);
            let _ = self.kernel.set(Kernel { pid, born });
        }
    }

    pub(crate) fn set_stdin(&self, stdin: Stdin) {
        let _ = self.stdin.set(stdin);
    }

    /// None for a command without input.
    pub(crate) fn stdin(&self) -> Option<&Stdin> {
        self.stdin.get()
    }

    /// Sends a signal to its group, if it is there.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(kernel) = self.kernel.get()
            && birth(kernel.pid) == kernel.born
        {
            let _ = rustix::process::kill_process_group(kernel.pid, signal);
        }
    }
}

/// When a process was born, in ticks since boot; none when there is no such process.
fn birth(pid: Pid) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name in parentheses may contain anything; the 20th field after it is the birth.
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields = std::str::from_utf8(&stat[after..]).ok()?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back_and_numbers_are_not() {
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
    fn our_own_birth_is_known() {
        let own = rustix::process::getpid();
        assert!(birth(own).is_some_and(|born| born > 0));
        assert_eq!(birth(own), birth(own));
    }
}
