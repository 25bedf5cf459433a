//! What is counted of all sandboxes together.

use k8e_model::egress::Flow;
use metrics::{Unit, counter, describe_counter};

const FLOWS: &str = "k8e_egress_flows_total";

/// Says what the names mean, once for a recorder.
pub(crate) fn describe() {
    describe_counter!(
        FLOWS,
        Unit::Count,
        "What sandboxes tried to reach, by verdict, protocol and reason"
    );
}

pub(crate) fn flow(flow: &Flow) {
    let reason = flow.reason.map_or("", |reason| reason.as_str());
    counter!(
        FLOWS,
        "verdict" => flow.verdict.as_str(),
        "protocol" => flow.protocol.as_str(),
        "reason" => reason
    )
    .increment(flow.count);
}
