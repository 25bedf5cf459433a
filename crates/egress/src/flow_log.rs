//! Flow log of one sandbox: what it tried to reach and the verdict. A ring buffer in memory, and a
//! broadcast channel for followers.
//!
//! A sandbox decides how many flows there are. So the log is bounded, and a flow that repeats is
//! counted in its first entry.

use k8e_model::egress::{DenyReason, Flow};
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::sync::broadcast;

/// Entries kept per sandbox: enough to see what a program did, about 100 KB.
const FLOWS_MAX: usize = 512;

/// How many of the newest entries are searched for a repetition.
const SAME_WITHIN: usize = 32;

/// Entries that a follower may lag behind before it misses some.
const BEHIND_MAX: usize = 256;

/// Denied names reported for one command: enough for people, and for a command that allows them.
const DENIED_MAX: usize = 16;

pub(crate) struct FlowLog {
    kept: Mutex<Kept>,
    live: broadcast::Sender<Flow>,
}

/// The entries, newest last, each with its sequence number.
#[derive(Default)]
struct Kept {
    flows: VecDeque<(u64, Flow)>,
    next: u64,
}

/// A position in a flow log (sequence number of the next entry).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowMark(u64);

/// Entries of a flow log: those kept so far and, for a follower, new ones.
#[derive(Debug)]
pub struct FlowStream {
    kept: VecDeque<Flow>,
    live: Option<broadcast::Receiver<Flow>>,
}

// === impl FlowLog ===

impl Default for FlowLog {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            live: broadcast::Sender::new(BEHIND_MAX),
        }
    }
}

impl FlowLog {
    pub(crate) fn add(&self, flow: Flow) {
        let mut kept = self.kept();
        let mut newest = kept.flows.iter().rev().take(SAME_WITHIN);
        let repeated = newest.position(|(_, known)| is_same(known, &flow));
        let entry = match repeated.and_then(|back| kept.flows.len().checked_sub(back + 1)) {
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
        kept.flows.push_back((number, entry.clone()));
        // An error means that there is no follower.
        let _ = self.live.send(entry);
    }

    /// The entries that are kept and, with `follow`, new ones.
    pub(crate) fn read(&self, follow: bool) -> FlowStream {
        let kept = self.kept();
        FlowStream {
            live: follow.then(|| self.live.subscribe()),
            kept: kept.flows.iter().map(|(_, flow)| flow.clone()).collect(),
        }
    }

    /// The current position, for [`Self::denied_since`].
    pub(crate) fn mark(&self) -> FlowMark {
        FlowMark(self.kept().next)
    }

    /// Flows that the policy denied since `mark`, oldest first: each name (address if it has none) once.
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
        // A panic while it was locked leaves a valid list.
        self.kept
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

// === impl FlowStream ===

impl FlowStream {
    /// The log of a sandbox without a gate.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            kept: VecDeque::new(),
            live: None,
        }
    }

    /// The next entry; none at the end of the log, or for a follower when the sandbox is destroyed.
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
    fn denied_flows_since_a_mark() {
        let flow_log = FlowLog::default();
        flow_log.add(denied("before.example", DenyReason::NotAllowed));
        flow_log.add(denied("again.example", DenyReason::NotAllowed));
        let mark = flow_log.mark();
        assert!(flow_log.denied_since(mark).is_empty());
        flow_log.add(denied("again.example", DenyReason::NotAllowed));
        flow_log.add(denied("gone.example", DenyReason::Unresolved));
        let with_port = Flow {
            protocol: FlowProtocol::Tcp,
            port: Some(443),
            ..denied("again.example", DenyReason::NotAllowed)
        };
        flow_log.add(with_port);
        flow_log.add(denied("listed.example", DenyReason::DenyList));
        let names = |flows: Vec<Flow>| flows.into_iter().filter_map(|flow| flow.name);
        let reported: Vec<_> = names(flow_log.denied_since(mark)).collect();
        assert_eq!(reported, ["again.example", "listed.example"]);
        for n in 0..2 * FLOWS_MAX {
            flow_log.add(denied(&format!("{n}.example"), DenyReason::NotAllowed));
        }
        assert_eq!(flow_log.denied_since(mark).len(), DENIED_MAX);
    }
}
