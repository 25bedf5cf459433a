//! What a sandbox tried to reach, and what became of it: the last of it, in memory, for people who
//! look, and live for those who wait.
//!
//! A sandbox decides how much is written here. So it is bounded, and the same thing again is a
//! number and not a line.

use k8e_model::egress::{DenyReason, Flow};
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::sync::broadcast;

/// Kept of one sandbox: enough to see what a program did, about 100 KB.
const FLOWS_MAX: usize = 512;

/// How far back something is looked for that is the same again.
const SAME_WITHIN: usize = 32;

/// What a follower may be behind before it misses some.
const BEHIND_MAX: usize = 256;

/// Denied names of one command: enough for people, and for a command that allows them.
const DENIED_MAX: usize = 16;

pub(crate) struct Journal {
    kept: Mutex<Kept>,
    live: broadcast::Sender<Flow>,
}

/// The newest last, each with the number it was written under.
#[derive(Default)]
struct Kept {
    flows: VecDeque<(u64, Flow)>,
    next: u64,
}

/// A point in what a sandbox tried: what comes after it can be asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowMark(u64);

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
        let mut again = kept.flows.iter().rev().take(SAME_WITHIN);
        let again = again.position(|(_, known)| is_same(known, &flow));
        let told = match again.and_then(|back| kept.flows.len().checked_sub(back + 1)) {
            Some(at) => {
                let known = kept.flows.remove(at).map(|(_, known)| known);
                let mut known = known.unwrap_or_else(|| flow.clone());
                known.at = flow.at;
                known.count = known.count.saturating_add(flow.count);
                known
            }
            None => flow,
        };
        if kept.flows.len() >= FLOWS_MAX {
            kept.flows.pop_front();
        }
        let number = kept.next;
        kept.next += 1;
        kept.flows.push_back((number, told.clone()));
        // Nobody listens, most of the time.
        let _ = self.live.send(told);
    }

    /// What is kept and, when asked to follow, what will be.
    pub(crate) fn read(&self, follow: bool) -> FlowStream {
        let kept = self.kept();
        FlowStream {
            live: follow.then(|| self.live.subscribe()),
            kept: kept.flows.iter().map(|(_, flow)| flow.clone()).collect(),
        }
    }

    /// Now, for [`Self::denied_since`].
    pub(crate) fn mark(&self) -> FlowMark {
        FlowMark(self.kept().next)
    }

    /// What rules denied since then, the oldest first: each name, or address without one, once.
    pub(crate) fn denied_since(&self, mark: FlowMark) -> Vec<Flow> {
        let kept = self.kept();
        let since = kept.flows.iter().filter(|(number, _)| *number >= mark.0);
        let mut denied: Vec<Flow> = Vec::new();
        for (_, flow) in since {
            let by_rule = flow.reason.is_some_and(DenyReason::is_by_rule);
            let who = |flow: &Flow| {
                (
                    flow.name.clone(),
                    flow.name.is_none().then_some(flow.address),
                )
            };
            let known = denied.iter().any(|known| who(known) == who(flow));
            if by_rule && !known && denied.len() < DENIED_MAX {
                denied.push(flow.clone());
            }
        }
        denied
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::egress::{FlowProtocol, FlowVerdict};

    fn denied(name: &str, reason: DenyReason) -> Flow {
        Flow {
            at: 0,
            verdict: FlowVerdict::Denied,
            protocol: FlowProtocol::Dns,
            name: Some(name.to_owned()),
            address: None,
            port: None,
            rule: None,
            reason: Some(reason),
            count: 1,
        }
    }

    #[test]
    fn what_was_denied_since_a_mark() {
        let journal = Journal::default();
        journal.add(denied("before.example", DenyReason::NotAllowed));
        journal.add(denied("again.example", DenyReason::NotAllowed));
        let mark = journal.mark();
        assert!(journal.denied_since(mark).is_empty());
        journal.add(denied("again.example", DenyReason::NotAllowed));
        journal.add(denied("gone.example", DenyReason::Unresolved));
        let with_port = Flow {
            protocol: FlowProtocol::Tcp,
            port: Some(443),
            ..denied("again.example", DenyReason::NotAllowed)
        };
        journal.add(with_port);
        journal.add(denied("listed.example", DenyReason::DenyList));
        let names = |flows: Vec<Flow>| flows.into_iter().filter_map(|flow| flow.name);
        let told: Vec<_> = names(journal.denied_since(mark)).collect();
        assert_eq!(told, ["again.example", "listed.example"]);
        for n in 0..2 * FLOWS_MAX {
            journal.add(denied(&format!("{n}.example"), DenyReason::NotAllowed));
        }
        assert_eq!(journal.denied_since(mark).len(), DENIED_MAX);
    }
}
