//! Egress proxy: DNS queries, ClientHellos and HTTP heads of a sandbox, and replies of upstreams. The
//! decoders are private to their crate; the invariants are in its module `fuzzing`.

use crate::outcome;
use k8e_egress::fuzzing;

pub(super) fn dns_query(bytes: &[u8]) -> u64 {
    outcome(&fuzzing::dns_query(bytes))
}

pub(super) fn dns_answer(bytes: &[u8]) -> u64 {
    outcome(&fuzzing::dns_answer(bytes))
}

pub(super) fn client_hello(bytes: &[u8]) -> u64 {
    outcome(&fuzzing::client_hello(bytes))
}

pub(super) fn http_head(bytes: &[u8]) -> u64 {
    outcome(&fuzzing::http_head(bytes))
}
