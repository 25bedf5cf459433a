//! Approvals: what is asked and decided, and how they are shown.

use crate::v1;
use k8e_model::{
    Approval, ApprovalAction, ApprovalId, ApprovalReason, ApprovalState, ApprovalTime, Error,
    SessionId,
};

/// The approval that a call names.
pub fn approval_id(text: &str) -> Result<ApprovalId, Error> {
    text.parse()
}

/// What shall be approved in which session, and how long that can be decided.
pub fn approval_request(
    wire: v1::RequestApprovalRequest,
) -> Result<(SessionId, ApprovalAction, ApprovalTime), Error> {
    Ok((
        wire.session_id.parse()?,
        wire.action.try_into()?,
        ApprovalTime::from_ms(wire.expires_in_ms)?,
    ))
}

/// What shall be approved.
pub fn approval_action(text: String) -> Result<ApprovalAction, Error> {
    text.try_into()
}

/// Why somebody decided as he did.
pub fn approval_reason(text: String) -> Result<ApprovalReason, Error> {
    text.try_into()
}

/// The session whose approvals are listed; an empty one is all.
pub fn session_filter(text: &str) -> Result<Option<SessionId>, Error> {
    (!text.is_empty()).then(|| text.parse()).transpose()
}

/// As it is shown.
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
