//! `k8e audit`: the audit log.

use crate::failure::Failure;
use crate::output;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use serde::Serialize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// First paragraphs of `k8e audit --help`.
pub(crate) const LONG_ABOUT: &str = "\
Show who changed what: one JSON object on each line, the oldest first.

Every call that changes something leaves a row, with the API key that it was made with (`key_id`),
where it came from (`source`: an address, or the user at the socket), and its result: `ok`, an
error's code, or `cancelled` when the caller left before the answer. For root and the group k8e, on the server itself.";

/// Arguments of `k8e audit`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e audit --since 1h
  k8e audit --principal ann --limit 1000 | jq -r 'select(.code != \"ok\")'
  k8e audit | jq -r 'select(.action == \"login\") | .object'     # certificates, by serial number")]
pub struct AuditArgs {
    /// Number of newest rows to print
    #[arg(long, default_value_t = 100, value_name = "N")]
    limit: u32,

    /// Only rows of the last 1h, 7d, … [default: all]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    since: Option<Span>,

    /// Only rows of this principal: that of an API key, local, or as printed in the rows
    #[arg(long, value_name = "NAME")]
    principal: Option<String>,
}

#[derive(Serialize)]
struct RowJson {
    at_unix_ms: i64,
    principal: String,
    /// Name of the API key that authenticated the call, directly or by a certificate; empty for none.
    key_id: String,
    /// An IP address, or `uid:N` at the Unix socket.
    source: String,
    action: String,
    object: String,
    code: String,
}

pub(crate) async fn run(args: AuditArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListAuditRequest {
        principal: args.principal.as_deref().map(principal).unwrap_or_default(),
        since_unix_ms: args
            .since
            .and_then(Span::into_option)
            .map_or(0, before_now_ms),
        limit: args.limit,
    };
    let listed = client.identity.list_audit(request).await?.into_inner();
    for row in listed.rows {
        output::json(&RowJson {
            at_unix_ms: row.at_unix_ms,
            principal: row.principal,
            key_id: row.key_id,
            source: row.source,
            action: row.action,
            object: row.object,
            code: row.code,
        })?;
    }
    Ok(0)
}

/// The principal as the rows have it.
fn principal(text: &str) -> String {
    if text == "local" || text.contains(':') {
        return text.to_owned();
    }
    format!("{}{text}", k8e_api::convert::PRINCIPAL_PREFIX)
}

fn before_now_ms(time: Duration) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let then = now.unwrap_or_default().saturating_sub(time);
    // Not 0, which means no bound.
    i64::try_from(then.as_millis()).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_may_be_named_by_name() {
        assert_eq!(principal("ann"), "user:ann");
        assert_eq!(principal("local"), "local");
        assert_eq!(principal("cert:admin"), "cert:admin");
    }
}
