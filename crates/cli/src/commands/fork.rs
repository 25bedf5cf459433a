//! `k8e sandbox fork`: sessions that continue from the point at which another one is.

use crate::failure::Failure;
use crate::output;
use crate::render::SessionJson;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;

pub(super) const LONG_ABOUT: &str = "\
Fork a session: make sessions that continue from the point at which it is.

With gVisor every fork has the memory of the session: all processes go on, in the session and in each fork,
apart from each other. Otherwise, and when the memory cannot be copied (`reason` says why), a fork has a copy
of the workspace and no processes. Limits, labels, environment and allowed hosts are those of the session.

The session is stopped for a moment, which is reported; calls to it wait meanwhile. It cannot be forked while
streams are open: commands that somebody waits for, attached shells, connections to its services. Background
runs, detached shells and what they started are no obstacle. A session that is paused and saved is forked from
its saved state, and stays paused.

Fails (exit code 1) when a fork could not be made; those that could are listed and stay.

Example:
  k8e sandbox fork $SID --count 3 | jq -r '.forks[].session_id'";

/// Arguments of `k8e sandbox fork`.
#[derive(Args, Debug)]
pub struct ForkArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Number of forks, 1 to 20
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,

    /// TTL of each fork: it is destroyed this long after its creation, as 2h, or never [default: that of the session]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    ttl: Option<Span>,
}

#[derive(Serialize)]
struct ForkedJson {
    session_id: String,
    /// How long the session was stopped.
    stopped_ms: f64,
    forks: Vec<ForkJson>,
}

#[derive(Serialize)]
struct ForkJson {
    session_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    memory: String,
    /// Why there is no memory.
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
    /// The kind of error.
    #[serde(skip_serializing_if = "String::is_empty")]
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<SessionJson>,
}

pub(crate) async fn fork(args: ForkArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ForkSessionRequest {
        session_id: args.session_id.clone(),
        count: args.count,
        ttl_s: args.ttl.map_or(0, Span::wire_seconds),
    };
    let forked = client.fork_session(request).await?.into_inner();
    let forks: Vec<_> = forked.forks.into_iter().map(ForkJson::from).collect();
    let failed = forks.iter().any(|fork| fork.session.is_none());
    let json = ForkedJson {
        session_id: args.session_id,
        stopped_ms: forked.stopped_us as f64 / 1000.0,
        forks,
    };
    output::json(&json).map(|()| u8::from(failed))
}

// === impl ForkJson ===

impl From<v1::Fork> for ForkJson {
    fn from(fork: v1::Fork) -> Self {
        Self {
            session_id: fork.session_id,
            memory: fork.memory,
            reason: fork.reason,
            error: fork.error,
            detail: fork.error_code,
            session: fork.session.map(SessionJson::from),
        }
    }
}
