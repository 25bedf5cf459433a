//! Approvals: requests and decisions to model types, and approvals to messages.

use crate::v1;
use k8e_model::{
    Approval, ApprovalAction, ApprovalId, ApprovalReason, ApprovalState, ApprovalTime, Error,
    SessionId,
};

/// The approval that a call names.
pub fn approval_id(text: &str) -> Result<ApprovalId, Error> {
    text.parse()
}

/// The action to approve, its session, and how long it can be decided.
pub fn approval_request(
    wire: v1::RequestApprovalRequest,
) -> Result<(SessionId, ApprovalAction, ApprovalTime), Error> {
    Ok((
        wire.session_id.parse()?,
        wire.action.try_into()?,
        ApprovalTime::from_ms(wire.expires_in_ms)?,
    ))
}

/// The action to approve.
pub fn approval_action(text: String) -> Result<ApprovalAction, Error> {
    text.try_into()
}

/// The reason of a decision.
pub fn approval_reason(text: String) -> Result<ApprovalReason, Error> {
    text.try_into()
}

/// The session whose approvals are listed; an empty one is all.
pub fn session_filter(text: &str) -> Result<Option<SessionId>, Error> {
    (!text.is_empty()).then(|| text.parse()).transpose()
}

/// An approval as a message.
pub fn approval(approval: Approval) -> v1::Approval {
    let state = approval.state.as_str().to_owned();
    let wire = v1::Approval {
        approval_id: approval.id.into(),
        session_id: approval.session.into(),
        owner: approval.owner,
        action: approval.action.as_str().to_owned(),
        state,
        asked_at_unix_ms: approval.asked_at,
        asked_by: approval.asked_by.principal,
        asked_with: approval.asked_by.proof.to_string(),
        expires_at_unix_ms: approval.expires_at,
        ..v1::Approval::default()
    };
    match approval.state {
        ApprovalState::Pending | ApprovalState::Expired => wire,
        ApprovalState::Decided(decision) => v1::Approval {
            decided_at_unix_ms: decision.at,
            decided_with: decision.by.proof.to_string(),
            decided_by: decision.by.principal,
            reason: decision.reason.as_str().to_owned(),
            ..wire
        },
    }
}
