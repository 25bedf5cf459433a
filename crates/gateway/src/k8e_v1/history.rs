//! History of a session: transcripts and events.

use super::{engine_status, model_status};
use k8e_api::{convert, v1};
use k8e_engine::Sessions;
use k8e_model::Principal;
use tonic::Status;

pub(super) async fn transcript(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::GetTranscriptRequest,
) -> Result<v1::Transcript, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let page = sessions
        .transcript(who, &id, request.offset, request.limit)
        .await
        .map_err(engine_status)?;
    Ok(v1::Transcript {
        output: page.output.into(),
        offset: page.offset,
        next_offset: page.next_offset,
        truncated_before: page.truncated_before,
        eof: page.eof,
    })
}

pub(super) async fn events(
    sessions: &Sessions,
    who: &Principal,
    request: &v1::GetEventsRequest,
) -> Result<v1::GetEventsResponse, Status> {
    let id = convert::session_id(&request.session_id).map_err(model_status)?;
    let page = sessions
        .events(who, &id, request.after, request.limit)
        .await
        .map_err(engine_status)?;
    let events = page.events.into_iter().map(|event| v1::Event {
        seq: event.seq,
        at_unix_ms: event.at,
        kind: event.kind,
        detail: event.detail,
    });
    Ok(v1::GetEventsResponse {
        events: events.collect(),
        truncated: page.truncated,
    })
}
