//! `k8e sandbox egress`: the egress log of a session, allowed and denied connections.

use super::allowing;
use crate::failure::Failure;
use crate::output;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use k8e_model::DenyReason;
use serde::Serialize;
use std::io::IsTerminal as _;

/// Longest valid host name; longer text is cut.
const NAME_CHARS_MAX: usize = 253;

/// Column width of targets; a longer one shifts only its own line.
const TARGET_WIDTH: usize = 44;

/// First paragraphs of `k8e sandbox egress --help`.
pub(super) const LONG_ABOUT: &str = "\
Show the egress log of a session: host names, addresses and ports that it connected to or looked up,
with the rule that allowed it or the reason why it was denied. Equal attempts are one entry with a count.

On a terminal it follows the log until Ctrl-C or the end of the session. Otherwise it prints the log
as one JSON object, or with --follow one JSON object per line.";

/// Arguments of `k8e sandbox egress`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox egress $SID
  k8e sandbox egress $SID --denied | jq -r '.flows[] | \"\\(.name) \\(.reason)\"'
  k8e sandbox egress $SID --follow | jq -c 'select(.protocol == \"tcp\")'")]
pub struct EgressArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Only denied attempts
    #[arg(long)]
    denied: bool,

    /// Print new entries as they happen, until the session ends; one JSON object per line
    #[arg(long, short)]
    follow: bool,
}

#[derive(Serialize)]
struct FlowsJson {
    session_id: String,
    flows: Vec<FlowJson>,
}

#[derive(Serialize)]
struct FlowJson {
    at_unix_ms: i64,
    verdict: &'static str,
    protocol: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u32>,
    #[serde(skip_serializing_if = "String::is_empty")]
    rule: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    /// The reason as a sentence, with the command that would allow it.
    #[serde(skip_serializing_if = "String::is_empty")]
    detail: String,
    count: u64,
}

// === impl EgressArgs ===

impl EgressArgs {
    /// Whether standard output is a terminal.
    pub(crate) fn for_people(&self) -> bool {
        std::io::stdout().is_terminal()
    }
}

pub(crate) async fn run(args: EgressArgs, mut client: Client) -> Result<u8, Failure> {
    let for_people = args.for_people();
    let request = v1::WatchEgressRequest {
        session_id: args.session_id.clone(),
        follow: args.follow || for_people,
        denied_only: args.denied,
    };
    if for_people {
        output::note("egress of the session, times in UTC; Ctrl-C to stop");
    }
    let mut coming = client.watch_egress(request).await?.into_inner();
    let mut flows = Vec::new();
    while let Some(flow) = coming.message().await? {
        if for_people {
            output::text(line(&args.session_id, &flow).as_bytes())?;
        } else if args.follow {
            output::json(&FlowJson::new(&args.session_id, flow))?;
        } else {
            flows.push(FlowJson::new(&args.session_id, flow));
        }
    }
    if for_people || args.follow {
        return Ok(0);
    }
    output::json(&FlowsJson {
        session_id: args.session_id,
        flows,
    })
    .map(|()| 0)
}

// === impl FlowJson ===

impl FlowJson {
    fn new(session_id: &str, flow: v1::EgressFlow) -> Self {
        Self {
            at_unix_ms: flow.at_unix_ms,
            verdict: verdict(&flow),
            protocol: protocol(&flow),
            port: (flow.port != 0).then_some(flow.port),
            detail: detail(session_id, &flow),
            name: flow.name,
            address: flow.address,
            rule: flow.rule,
            reason: flow.reason,
            count: flow.count,
        }
    }
}

/// One flow as a line of text.
fn line(session_id: &str, flow: &v1::EgressFlow) -> String {
    let why = match (flow.verdict(), flow.rule.is_empty()) {
        (v1::EgressVerdict::Denied, true) => explained(session_id, flow),
        (v1::EgressVerdict::Denied, false) => {
            format!("{} ({})", explained(session_id, flow), clean(&flow.rule))
        }
        (_, true) => String::new(),
        (_, false) => format!("by {}", clean(&flow.rule)),
    };
    let times = match flow.count {
        0 | 1 => String::new(),
        count => format!("  {count} times"),
    };
    let line = format!(
        "{}  {:7}  {:3}  {:TARGET_WIDTH$}  {why}{times}",
        clock(flow.at_unix_ms),
        verdict(flow),
        protocol(flow),
        target(flow),
    );
    format!("{}\n", line.trim_end())
}

/// Name, port and address of the destination, as far as they are known.
fn target(flow: &v1::EgressFlow) -> String {
    let port = match flow.port {
        0 => String::new(),
        port => format!(":{port}"),
    };
    let (name, address) = (clean(&flow.name), clean(&flow.address));
    match (name.is_empty(), address.is_empty()) {
        (true, _) => format!("{address}{port}"),
        (false, true) => format!("{name}{port}"),
        (false, false) => format!("{name}{port} ({address})"),
    }
}

fn explained(session_id: &str, flow: &v1::EgressFlow) -> String {
    match detail(session_id, flow).as_str() {
        "" => clean(&flow.reason),
        detail => format!("{}: {detail}", clean(&flow.reason)),
    }
}

/// Why it was denied and what to do; empty for an unknown reason, of a newer server.
fn detail(session_id: &str, flow: &v1::EgressFlow) -> String {
    let reason = flow.reason.parse::<DenyReason>();
    let sentence = reason.map_or("", DenyReason::sentence);
    match allowing::entry(flow) {
        Some(entry) => format!("{sentence}; {}", allowing::command(session_id, &[entry])),
        None => sentence.to_owned(),
    }
}

fn verdict(flow: &v1::EgressFlow) -> &'static str {
    match flow.verdict() {
        v1::EgressVerdict::Allowed => "allowed",
        v1::EgressVerdict::Denied => "denied",
        v1::EgressVerdict::Unspecified => "unknown",
    }
}

fn protocol(flow: &v1::EgressFlow) -> &'static str {
    match flow.protocol() {
        v1::EgressProtocol::Dns => "dns",
        v1::EgressProtocol::Tcp => "tcp",
        v1::EgressProtocol::Udp => "udp",
        v1::EgressProtocol::Unspecified => "?",
    }
}

/// Replaces control characters in text that the sandbox chose, so that it cannot control the terminal.
pub(super) fn clean(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_graphic() { c } else { '?' };
    text.chars().take(NAME_CHARS_MAX).map(plain).collect()
}

/// Time of day in UTC, as 12:34:56.
fn clock(unix_ms: i64) -> String {
    let second = unix_ms.div_euclid(1000).rem_euclid(24 * 3600);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{hour:02}:{minute:02}:{:02}", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow() -> v1::EgressFlow {
        v1::EgressFlow {
            at_unix_ms: 1_700_000_000_123,
            verdict: v1::EgressVerdict::Allowed.into(),
            protocol: v1::EgressProtocol::Tcp.into(),
            name: "a.example".into(),
            address: "192.0.2.1".into(),
            port: 443,
            rule: "*.example".into(),
            reason: String::new(),
            count: 1,
        }
    }

    fn denied() -> v1::EgressFlow {
        v1::EgressFlow {
            verdict: v1::EgressVerdict::Denied.into(),
            protocol: v1::EgressProtocol::Dns.into(),
            name: "b.example".into(),
            address: String::new(),
            port: 0,
            rule: String::new(),
            reason: "not_allowed".into(),
            count: 3,
            ..flow()
        }
    }

    #[test]
    fn lines_are_aligned() {
        let (allowed, denied) = (line("sess-a", &flow()), line("sess-a", &denied()));
        let start = "22:13:20  allowed  tcp  a.example:443 (192.0.2.1) ";
        assert!(allowed.starts_with(start), "{allowed}");
        assert!(allowed.ends_with("  by *.example\n"), "{allowed}");
        let start = "22:13:20  denied   dns  b.example ";
        assert!(denied.starts_with(start), "{denied}");
        assert!(denied.ends_with("  3 times\n"), "{denied}");
        assert_eq!(allowed.find("by"), denied.find("not_allowed: no rule"));
    }

    #[test]
    fn a_name_cannot_command_the_terminal() {
        let hostile = v1::EgressFlow {
            name: format!("\x1b]0;x\x07\u{9b}2J\r\n{}", "a".repeat(10_000)),
            rule: "\x1b[2J".into(),
            reason: "\x1b[2J".into(),
            ..denied()
        };
        let line = line("sess-a", &hostile);
        assert!(line.len() < 1000);
        let text = line.trim_end_matches('\n');
        assert!(text.bytes().all(|b| b.is_ascii_graphic() || b == b' '));
    }

    #[test]
    fn json_leaves_out_what_is_not_known() {
        let json = serde_json::to_value(FlowJson::new("sess-a", denied())).unwrap();
        assert_eq!(json["verdict"], "denied");
        assert_eq!(
            (&json["name"], &json["count"]),
            (&"b.example".into(), &3.into())
        );
        assert_eq!(json["reason"], "not_allowed");
        assert_eq!(
            json["detail"],
            "no rule of the session allows it; `k8e sandbox allow-hosts --session-id sess-a --add b.example` allows it"
        );
        assert!(json.get("port").is_none() && json.get("address").is_none());
        let json = serde_json::to_value(FlowJson::new("sess-a", flow())).unwrap();
        assert_eq!(
            (&json["port"], &json["rule"]),
            (&443.into(), &"*.example".into())
        );
        assert!(json.get("reason").is_none() && json.get("detail").is_none());
    }

    #[test]
    fn what_a_newer_server_says_is_shown_as_it_is() {
        let newer = v1::EgressFlow {
            verdict: 9,
            protocol: 9,
            reason: "mood".into(),
            ..flow()
        };
        assert!(
            line("sess-a", &newer).contains("unknown  ?  "),
            "{}",
            line("sess-a", &newer)
        );
        let json = serde_json::to_value(FlowJson::new("sess-a", newer)).unwrap();
        assert_eq!(
            (&json["reason"], &json["verdict"]),
            (&"mood".into(), &"unknown".into())
        );
    }
}
