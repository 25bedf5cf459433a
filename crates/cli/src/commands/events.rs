//! `k8e sandbox events`: the event log of a session.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;

const FOLLOW_PAUSE: Duration = Duration::from_millis(500);

/// Arguments of `k8e sandbox events`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox events $SID | jq -r '.events[] | \"\\(.seq) \\(.kind)\"'
  k8e sandbox events $SID --follow    # one JSON object per line")]
pub struct EventsArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Largest number of events to print
    #[arg(long, default_value_t = 500, value_name = "N")]
    limit: u32,

    /// Only events with a sequence number above this
    #[arg(long, default_value_t = 0, value_name = "SEQ")]
    after: u64,

    /// Print new events as they happen, until the session ends; one JSON object per line
    #[arg(long, short)]
    follow: bool,
}

/// JSON output, with the keys of the Go K8E.
#[derive(Serialize)]
struct EventsJson {
    events: Vec<EventJson>,
    returned: usize,
    truncated: bool,
}

#[derive(Serialize)]
struct EventJson {
    seq: u64,
    at_unix_ms: i64,
    kind: String,
    detail: Value,
}

pub(crate) async fn run(args: EventsArgs, mut client: Client) -> Result<u8, Failure> {
    if args.follow {
        return follow(args, client).await;
    }
    let page = page(&mut client, &args.session_id, args.after, args.limit).await?;
    let events: Vec<EventJson> = page.events.into_iter().map(EventJson::from).collect();
    let returned = events.len();
    output::json(&EventsJson {
        events,
        returned,
        truncated: page.truncated,
    })
    .map(|()| 0)
}

async fn follow(args: EventsArgs, mut client: Client) -> Result<u8, Failure> {
    let mut after = args.after;
    loop {
        // Read before the page: events up to the end are then still printed.
        let ended = super::get::ended(&mut client, &args.session_id).await?;
        let page = page(&mut client, &args.session_id, after, args.limit).await?;
        let last = page.events.last().map(|event| event.seq);
        for event in page.events {
            output::json(&EventJson::from(event))?;
        }
        match last {
            Some(seq) => after = seq,
            None if ended => return Ok(0),
            None => tokio::time::sleep(FOLLOW_PAUSE).await,
        }
    }
}

async fn page(
    client: &mut Client,
    session_id: &str,
    after: u64,
    limit: u32,
) -> Result<v1::GetEventsResponse, Failure> {
    let request = v1::GetEventsRequest {
        session_id: session_id.to_owned(),
        after,
        limit,
    };
    Ok(client.get_events(request).await?.into_inner())
}

// === impl EventJson ===

impl From<v1::Event> for EventJson {
    fn from(event: v1::Event) -> Self {
        let detail = serde_json::from_str(&event.detail).unwrap_or(Value::String(event.detail));
        Self {
            seq: event.seq,
            at_unix_ms: event.at_unix_ms,
            kind: event.kind,
            detail,
        }
    }
}
