//! `k8e sandbox confirm`, `approve` and `approvals`: human approval of an agent's actions.

use crate::failure::{EXIT_REQUEST, Failure};
use crate::output;
use crate::units::{self, Span};
use clap::Args;
use k8e_api::client::{Client, working_for};
use k8e_api::status::{Status, from_status};
use k8e_api::{convert, v1};
use k8e_model::Code;
use serde::Serialize;
use std::time::Duration;

/// Default timeout of `confirm`, as in the Go K8E.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);

/// Environment variable with the session that an agent works in.
const SESSION_VARIABLE: &str = "K8E_SANDBOX_SESSION_ID";

/// First paragraphs of `k8e sandbox confirm --help`.
pub(super) const LONG_ABOUT: &str = "\
Request human approval for an action, and wait for the decision.

Exits with 0 when it was approved, and with 1 when it was rejected or the timeout is over:

  k8e sandbox confirm $SID 'drop the table users' --timeout 10m && drop_it

The command that approves it is printed on standard error. The requester cannot approve its own
request: that takes another API key, or root on the server's Unix socket, and a shell in which
K8E_SANDBOX_SESSION_ID is not set to that session.";

/// Arguments of `k8e sandbox confirm`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox confirm $SID 'push to main' --timeout 5m
  ID=$(k8e sandbox confirm $SID 'push to main' --no-wait | jq -r .approval_id)
  k8e sandbox confirm --approval-id $ID      # waits for it, also after a restart of the server")]
pub struct ConfirmArgs {
    /// Id of the session that the action is about
    #[arg(value_name = "SESSION", required_unless_present = "approval_id")]
    session_id: Option<String>,

    /// Description of the action, shown to the person who decides
    #[arg(value_name = "ACTION", required_unless_present = "approval_id")]
    action: Option<String>,

    /// Timeout of the request, after which it is expired and counts as rejected; at most 24h [default: 30s, with
    /// --no-wait 5m]
    #[arg(long, value_name = "TIME", value_parser = units::span)]
    timeout: Option<Span>,

    /// Register the request, print its id and do not wait
    #[arg(long)]
    no_wait: bool,

    /// Wait for the decision on an existing request
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["session_id", "action", "timeout", "no_wait"]
    )]
    approval_id: Option<String>,
}

/// Arguments of `k8e sandbox approve`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox approvals
  k8e sandbox approve approval-abc --reason 'the backup is there'
  k8e sandbox approve approval-abc --reject --reason 'not on a Friday'")]
pub struct ApproveArgs {
    /// Id of the request, as `approvals` shows it
    #[arg(value_name = "ID")]
    approval_id: String,

    /// Reject the request
    #[arg(long)]
    reject: bool,

    /// Reason of the decision, reported to the requester
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// Arguments of `k8e sandbox approvals`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Example:
  k8e sandbox approvals | jq -r '.approvals[] | [.approval_id, .session_id, .action] | @tsv'")]
pub struct ApprovalsArgs {
    /// Only requests of this session
    #[arg(long, value_name = "ID", default_value = "")]
    session_id: String,

    /// Include decided and expired requests
    #[arg(long)]
    all: bool,
}

/// The validated request of `confirm`.
#[derive(Debug)]
pub(crate) enum ConfirmRequest {
    Ask {
        request: v1::RequestApprovalRequest,
        wait: bool,
    },
    Again(String),
}

/// JSON output: the keys of the Go K8E, and the state.
#[derive(Serialize)]
struct ConfirmJson<'a> {
    approved: bool,
    approval_id: &'a str,
    state: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    decided_by: &'a str,
}

#[derive(Serialize)]
struct ApproveJson {
    ok: bool,
    approval_id: String,
    state: String,
}

#[derive(Serialize)]
struct ApprovalsJson {
    approvals: Vec<ApprovalJson>,
}

/// Times are Unix seconds.
#[derive(Serialize)]
struct ApprovalJson {
    approval_id: String,
    session_id: String,
    owner: String,
    action: String,
    state: String,
    asked_by: String,
    asked_with: String,
    asked_at: i64,
    expires_at: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    decided: Option<DecidedJson>,
}

#[derive(Serialize)]
struct DecidedJson {
    by: String,
    with: String,
    at: i64,
    reason: String,
}

// === impl ConfirmArgs ===

impl ConfirmArgs {
    pub(crate) fn request(self) -> Result<ConfirmRequest, Failure> {
        if let Some(id) = self.approval_id {
            return Ok(ConfirmRequest::Again(id));
        }
        let expires_in = match self.timeout {
            Some(time) => time.into_option().ok_or_else(|| {
                Failure::request(
                    "--timeout of an approval request cannot be never: 24h at most",
                    "invalid",
                )
            })?,
            // 0 is the server's default.
            None if self.no_wait => Duration::ZERO,
            None => WAIT_DEFAULT,
        };
        let request = v1::RequestApprovalRequest {
            session_id: self.session_id.unwrap_or_default(),
            action: self.action.unwrap_or_default(),
            expires_in_ms: u64::try_from(expires_in.as_millis()).unwrap_or(u64::MAX),
        };
        // Validated before anything is sent.
        convert::approval_request(request.clone())?;
        Ok(ConfirmRequest::Ask {
            request,
            wait: !self.no_wait,
        })
    }
}

pub(crate) async fn confirm(request: ConfirmRequest, mut client: Client) -> Result<u8, Failure> {
    let id = match request {
        ConfirmRequest::Again(id) => id,
        ConfirmRequest::Ask { request, wait } => {
            let asked = client.approvals.request_approval(request).await?;
            let asked = asked.into_inner();
            let id = &asked.approval_id;
            output::note(&format!(
                "waiting for approval; another user decides with the following command, or rejects with --reject:\n  k8e sandbox approve {id}"
            ));
            if !wait {
                return confirmed(&asked).map(|_| 0);
            }
            asked.approval_id
        }
    };
    let request = v1::WaitApprovalRequest {
        approval_id: id.clone(),
    };
    match client.approvals.wait_approval(request).await {
        Ok(answer) => confirmed(answer.get_ref()),
        Err(status) if timed_out(&status) => {
            output::note(&from_status(&status).message);
            confirmed(&v1::Approval {
                approval_id: id,
                state: "expired".to_owned(),
                ..v1::Approval::default()
            })
        }
        Err(status) => Err(status.into()),
    }
}

pub(crate) async fn approve(args: ApproveArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::DecideApprovalRequest {
        approval_id: args.approval_id,
        approved: !args.reject,
        reason: args.reason,
    };
    // An agent has the variable set: the server refuses to let it approve its own session's requests.
    let session = std::env::var(SESSION_VARIABLE).unwrap_or_default();
    let decided = client
        .approvals
        .decide_approval(working_for(&session, request))
        .await?;
    let decided = decided.into_inner();
    output::json(&ApproveJson {
        ok: true,
        approval_id: decided.approval_id,
        state: decided.state,
    })
    .map(|()| 0)
}

pub(crate) async fn list(args: ApprovalsArgs, mut client: Client) -> Result<u8, Failure> {
    let request = v1::ListApprovalsRequest {
        session_id: args.session_id,
        all: args.all,
    };
    let listed = client.approvals.list_approvals(request).await?.into_inner();
    let approvals = listed.approvals.into_iter().map(ApprovalJson::from);
    output::json(&ApprovalsJson {
        approvals: approvals.collect(),
    })
    .map(|()| 0)
}

/// Prints the state; exit code 0 when approved.
fn confirmed(approval: &v1::Approval) -> Result<u8, Failure> {
    let approved = approval.state == "approved";
    output::json(&ConfirmJson {
        approved,
        approval_id: &approval.approval_id,
        state: &approval.state,
        reason: &approval.reason,
        decided_by: &approval.decided_by,
    })?;
    Ok(if approved { 0 } else { EXIT_REQUEST })
}

fn timed_out(status: &Status) -> bool {
    from_status(status).code == Code::Timeout
}

// === impl ApprovalJson ===

impl From<v1::Approval> for ApprovalJson {
    fn from(approval: v1::Approval) -> Self {
        let decided = (approval.decided_at_unix_ms != 0).then_some(DecidedJson {
            by: approval.decided_by,
            with: approval.decided_with,
            at: approval.decided_at_unix_ms / 1000,
            reason: approval.reason,
        });
        Self {
            approval_id: approval.approval_id,
            session_id: approval.session_id,
            owner: approval.owner,
            action: approval.action,
            state: approval.state,
            asked_by: approval.asked_by,
            asked_with: approval.asked_with,
            asked_at: approval.asked_at_unix_ms / 1000,
            expires_at: approval.expires_at_unix_ms / 1000,
            decided,
        }
    }
}
