//! What a sandbox tried to reach, and what became of it: the last of it, in memory, for people who
//! look, and live for those who wait.
//!
//! A sandbox decides how much is written here. So it is bounded, and the same thing again is a
//! number and not a line.

use k8e_model::egress::Flow;
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::sync::broadcast;

/// Kept of one sandbox: enough to see what a program did, about 100 KB.
const FLOWS_MAX: usize = 512;

/// How far back something is looked for that is the same again.
const SAME_WITHIN: usize = 32;

/// What a follower may be behind before it misses some.
const BEHIND_MAX: usize = 256;

pub(crate) struct Journal {
    kept: Mutex<VecDeque<Flow>>,
    live: broadcast::Sender<Flow>,
}

/// What was tried so far and, for those who want to wait, what comes next.
#[derive(Debug)]
pub struct FlowStream {
    kept: VecDeque<Flow>,
    live: Option<broadcast::Receiver<Flow>>,
}

// === impl Journal ===

impl Default for Journal {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            live: broadcast::Sender::new(BEHIND_MAX),
        }
    }
}

impl Journal {
    pub(crate) fn add(&self, flow: Flow) {
        let mut kept = self.kept();
        let mut again = kept.iter().rev().take(SAME_WITHIN);
        let again = again.position(|known| is_same(known, &flow));
        let told = match again.and_then(|back| kept.len().checked_sub(back + 1)) {
            Some(at) => {
                let mut known = kept.remove(at).unwrap_or_else(|| flow.clone());
                known.at = flow.at;
                known.count = known.count.saturating_add(flow.count);
                known
            }
            None => flow,
        };
        if kept.len() >= FLOWS_MAX {
            kept.pop_front();
        }
        kept.push_back(told.clone());
        // Nobody listens, most of the time.
        let _ = self.live.send(told);
    }

    /// What is kept and, when asked to follow, what will be.
    pub(crate) fn read(&self, follow: bool) -> FlowStream {
        let kept = self.kept();
        FlowStream {
            live: follow.then(|| self.live.subscribe()),
            kept: kept.clone(),
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, VecDeque<Flow>> {
        // A panic in between leaves a list that is still a list.
        self.kept
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

// === impl FlowStream ===

impl FlowStream {
    /// Of a sandbox that has no gate.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            kept: VecDeque::new(),
            live: None,
        }
    }

    /// The next one; none at the end of what there is, or when the sandbox is gone.
    pub async fn next(&mut self) -> Option<Flow> {
        if let Some(flow) = self.kept.pop_front() {
            return Some(flow);
        }
        let live = self.live.as_mut()?;
        loop {
            match live.recv().await {
                Ok(flow) => return Some(flow),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}

fn is_same(known: &Flow, flow: &Flow) -> bool {
    (known.verdict, known.protocol, known.port, known.reason)
        == (flow.verdict, flow.protocol, flow.port, flow.reason)
        && known.address == flow.address
        && known.name == flow.name
        && known.rule == flow.rule
}
