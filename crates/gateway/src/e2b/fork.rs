//! `POST /sandboxes/{id}/fork`: sandboxes that continue from the point at which another one is.

use super::body::{self, Answer, Upload};
use super::control::{Call, TIMEOUT_DEFAULT_S};
use super::create;
use super::error::Failure;
use hyper::StatusCode;
use k8e_engine::ForkedSession;
use k8e_model::{ForkCount, ForkSpec, SessionId, TimeLimit};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;

#[derive(Deserialize)]
struct ForkBody {
    timeout: Option<i64>,
    count: Option<u32>,
}

/// Forks one of the caller's sandboxes. One answer for each fork: a sandbox, or why it could not be made.
pub(super) async fn fork(
    call: &Call<'_>,
    id: &SessionId,
    upload: Upload,
) -> Result<Answer, Failure> {
    let asked: ForkBody = upload.json().await?;
    let seconds = asked.timeout.unwrap_or(TIMEOUT_DEFAULT_S);
    let ttl = Duration::from_secs(create::checked_timeout(seconds)?);
    let spec = ForkSpec {
        count: ForkCount::new(asked.count.unwrap_or(1))?,
        ttl: TimeLimit::After(ttl),
    };
    let forked = call.api.sessions.fork(&call.who, id, spec).await?;
    let mut all = Vec::new();
    for fork in forked.sessions {
        all.push(described(call, fork).await?);
    }
    body::json(StatusCode::CREATED, &all)
}

async fn described(call: &Call<'_>, fork: ForkedSession) -> Result<Value, Failure> {
    Ok(match fork.made {
        Ok((view, _)) => json!({ "sandbox": create::described(call, &view).await? }),
        Err(error) => {
            let failure = Failure::of(&error);
            json!({ "error": { "code": failure.status.as_u16(), "message": failure.message } })
        }
    })
}
