//! Prometheus metrics of the egress proxy, summed over all sandboxes.

use k8e_model::egress::Flow;
use metrics::{Unit, counter, describe_counter};

const FLOWS: &str = "k8e_egress_flows_total";

/// Registers the help texts of the metrics with the installed recorder.
pub(crate) fn describe() {
    describe_counter!(
        FLOWS,
        Unit::Count,
        "Flows of sandboxes (DNS queries, connections, datagrams) by verdict, protocol and reason"
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
