//! Reaping of child processes (`waitpid`). As init the guest reaps every process of the sandbox; otherwise only its own
//! supervisors, because other children belong to the program that it is a part of. Supervisors send no SIGCHLD when they end:
//! the task that expects the end of one reaps it.

use crate::exec::Loan;
use crate::{Guest, sys};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Longest wait for the exit of a supervisor that is done. Only a stopped one takes long.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Poll interval, should a SIGCHLD be lost.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// Supervisors that were not reaped yet, and the memory they use. While one is in here, its process
/// id cannot be reused.
#[derive(Debug, Default)]
pub(crate) struct Supervisors(Mutex<HashMap<i32, Loan>>);

// === impl Supervisors ===

impl Supervisors {
    /// Adds one, right after it was made.
    pub(crate) fn insert(&self, pid: i32, loan: Loan) {
        self.map().insert(pid, loan);
    }

    /// Whether it was not reaped yet.
    pub(crate) fn contains(&self, pid: i32) -> bool {
        self.map().contains_key(&pid)
    }

    fn remove(&self, pid: i32) {
        self.map().remove(&pid);
    }

    fn map(&self) -> std::sync::MutexGuard<'_, HashMap<i32, Loan>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Supervisors {
    /// Supervisors that were not reaped may still use their memory: it is leaked.
    fn drop(&mut self) {
        for (_, loan) in self.map().drain() {
            std::mem::forget(loan);
        }
    }
}

/// Reaps as init, forever. Statuses are dropped: supervisors report through a pipe.
pub(crate) async fn reap_everything(guest: Arc<Guest>) {
    let Ok(mut child) = signal(SignalKind::child()) else {
        return;
    };
    loop {
        while let Ok(Some(pid)) = sys::reap(-1) {
            guest.supervisors.remove(pid);
        }
        let _ = tokio::time::timeout(SWEEP_EVERY, child.recv()).await;
    }
}

/// Reaps a supervisor that is about to exit.
pub(crate) fn reap_when_gone(guest: &Arc<Guest>, supervisor: i32) {
    let guest = Arc::clone(guest);
    tokio::spawn(async move {
        let begin = tokio::time::Instant::now();
        while begin.elapsed() < GONE_WITHIN && !reap_one(&guest, supervisor) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

/// Reaps a supervisor that was just killed, when there is no runtime to wait in.
pub(crate) fn reap_now(guest: &Guest, supervisor: i32) {
    for _ in 0..100 {
        if reap_one(guest, supervisor) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn reap_one(guest: &Guest, supervisor: i32) -> bool {
    let gone = !matches!(sys::reap(supervisor), Ok(None));
    if gone {
        guest.supervisors.remove(supervisor);
    }
    gone
}
