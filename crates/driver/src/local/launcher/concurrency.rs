//! Concurrency limits of requests for which the launcher forks a process.
//!
//! The launcher enforces a ceiling for each class and refuses what is above it: a compromised server
//! cannot make it fork without bound. The real server never gets there: it has a semaphore for
//! each class ([`Turns`]) with half as many permits, and its requests wait in order. The other half is for
//! processes that have answered and not ended yet.
//!
//! The classes do not share: launches that hang keep no sandbox from being removed.

use crate::DriverError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent launches. The engine asks for two per CPU; more would not
/// be faster.
const LAUNCHES_MAX: usize = 64;

/// Concurrent removals.
const REMOVALS_MAX: usize = 64;

/// Concurrent requests of other kinds: freezing, opening a gate's sockets.
const OTHERS_MAX: usize = 32;

/// Layers of images that the server has unpacked or removed at once: each may take minutes, and a CPU.
const LAYERS_MAX: usize = 4;

/// Of the server's own maximum: where the launcher refuses.
const CEILING_FACTOR: usize = 2;

/// Class of requests that share a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Launch of a sandbox.
    Launch,
    /// Removal of a sandbox.
    Removal,
    /// Unpacks or removes a layer of an image.
    Layer,
    /// Anything else that may take long.
    Other,
}

/// The server's side: one fair (FIFO) semaphore for each class.
#[derive(Debug)]
pub(crate) struct Turns {
    launches: Arc<Semaphore>,
    removals: Arc<Semaphore>,
    layers: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

/// The launcher's side: pidfds of the processes that it has forked and that have not exited.
#[derive(Debug, Default)]
pub(super) struct Children {
    launches: Vec<OwnedFd>,
    removals: Vec<OwnedFd>,
    layers: Vec<OwnedFd>,
    others: Vec<OwnedFd>,
}

// === impl Class ===

impl Class {
    /// The server's limit.
    const fn server_max(self) -> usize {
        match self {
            Self::Launch => LAUNCHES_MAX,
            Self::Removal => REMOVALS_MAX,
            Self::Layer => LAYERS_MAX,
            Self::Other => OTHERS_MAX,
        }
    }

    /// The launcher's limit.
    const fn ceiling(self) -> usize {
        CEILING_FACTOR * self.server_max()
    }
}

// === impl Turns ===

impl Default for Turns {
    fn default() -> Self {
        let turns = |class: Class| Arc::new(Semaphore::new(class.server_max()));
        Self {
            launches: turns(Class::Launch),
            removals: turns(Class::Removal),
            layers: turns(Class::Layer),
            others: turns(Class::Other),
        }
    }
}

impl Turns {
    /// Waits for a permit of this class.
    pub(crate) async fn wait(&self, class: Class) -> OwnedSemaphorePermit {
        let turns = match class {
            Class::Launch => &self.launches,
            Class::Removal => &self.removals,
            Class::Layer => &self.layers,
            Class::Other => &self.others,
        };
        let turn = Arc::clone(turns).acquire_owned().await;
        turn.expect("these semaphores are never closed")
    }
}

// === impl Children ===

impl Children {
    /// An error when this class is at its limit.
    pub(super) fn check_room(&mut self, class: Class) -> Result<(), DriverError> {
        let children = self.of(class);
        forget_ended(children);
        match children.len() < class.ceiling() {
            true => Ok(()),
            false => Err(DriverError::Busy),
        }
    }

    /// Counts a process until it has exited.
    pub(super) fn add(&mut self, class: Class, process: OwnedFd) {
        self.of(class).push(process);
    }

    fn of(&mut self, class: Class) -> &mut Vec<OwnedFd> {
        match class {
            Class::Launch => &mut self.launches,
            Class::Removal => &mut self.removals,
            Class::Layer => &mut self.layers,
            Class::Other => &mut self.others,
        }
    }
}

fn forget_ended(children: &mut Vec<OwnedFd>) {
    if children.is_empty() {
        return;
    }
    let mut polled: Vec<_> = children
        .iter()
        .map(|process| PollFd::new(process, PollFlags::IN))
        .collect();
    // If poll fails all of them count as alive.
    if poll(&mut polled, Some(&Timespec::default())).is_err() {
        return;
    }
    let mut ended: Vec<_> = polled
        .iter()
        .map(|process| !process.revents().is_empty())
        .collect();
    drop(polled);
    let mut ended = ended.drain(..);
    children.retain(|_| !ended.next().unwrap_or(false));
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::Command;

    #[test]
    fn what_is_above_the_ceiling_is_refused_until_a_process_has_ended() {
        let mut children = Children::default();
        let start = || Command::new("sleep").arg("1000").spawn().unwrap();
        let held = |child| pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let mut running: Vec<_> = (0..Class::Other.ceiling()).map(|_| start()).collect();
        for child in &running {
            children.check_room(Class::Other).unwrap();
            children.add(Class::Other, held(child));
        }
        let refused = children.check_room(Class::Other).unwrap_err();
        assert!(matches!(refused, DriverError::Busy), "{refused}");
        // Another class has room.
        children.check_room(Class::Removal).unwrap();
        let mut first = running.remove(0);
        first.kill().unwrap();
        first.wait().unwrap();
        children.check_room(Class::Other).unwrap();
        assert_eq!(children.others.len(), running.len());
        for mut child in running {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn a_class_that_is_full_waits_and_no_other_does() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for _ in 0..LAUNCHES_MAX {
            held.push(turns.wait(Class::Launch).await);
        }
        drop(turns.wait(Class::Removal).await);
        let mut next = std::pin::pin!(turns.wait(Class::Launch));
        tokio::select! {
            biased;
            _ = &mut next => panic!("one too many"),
            () = tokio::task::yield_now() => {}
        }
        held.pop();
        drop(next.await);
    }
}
