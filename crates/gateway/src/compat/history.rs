//! Transcripts and events.

use super::text::torn_bytes;
use crate::grpc::{engine_status, model_status};
use k8e_api::convert::compat;
use k8e_api::sandbox_v1 as k8e;
use k8e_engine::{Event, Sessions, TranscriptPage};
use k8e_model::{Error, Principal, SessionId};
use serde_json::{Value, json};
use tonic::Status;

/// As K8E has it.
const EVENTS_DEFAULT: usize = 500;

/// More than a session keeps.
const EVENTS_MAX: u32 = 1000;

/// K8E's transcripts are always empty: its agent writes none.
pub(super) async fn transcript(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::GetTranscriptRequest,
) -> Result<k8e::GetTranscriptResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let (offset, limit) = (number(request.offset)?, number(request.limit)?);
    let page = sessions.transcript(who, &id, offset, limit).await;
    let page = whole_lines(page.map_err(engine_status)?);
    Ok(k8e::GetTranscriptResponse {
        session_id: request.session_id.clone(),
        output: String::from_utf8_lossy(&page.output).into_owned(),
        offset: signed(page.offset),
        next_offset: signed(page.next_offset),
        truncated_before: page.truncated_before,
        eof: page.eof,
    })
}

/// The newest events of this session: K8E's are of whoever used the sandbox.
pub(super) async fn events(
    sessions: &Sessions,
    who: &Principal,
    request: &k8e::GetEventsRequest,
) -> Result<k8e::GetEventsResponse, Status> {
    let id = compat::session_id(&request.session_id).map_err(model_status)?;
    let limit = match usize::try_from(number(request.limit)?).unwrap_or(usize::MAX) {
        0 => EVENTS_DEFAULT,
        limit => limit,
    };
    let page = sessions.events(who, &id, 0, EVENTS_MAX).await;
    let page = page.map_err(engine_status)?;
    let older = page.events.len().saturating_sub(limit);
    let events: Vec<_> = page.events[older..].iter().map(|e| event(&id, e)).collect();
    Ok(k8e::GetEventsResponse {
        truncated: page.truncated || older > 0,
        returned: i64::try_from(events.len()).unwrap_or(i64::MAX),
        events,
    })
}

/// Ends a page with a line, so that no character is torn between two pages. A page without the end
/// of a line, or the newest, ends with a character; one that is nothing else but a torn one goes out,
/// or a reader would ask for it for ever.
fn whole_lines(mut page: TranscriptPage) -> TranscriptPage {
    let output = &mut page.output;
    let line = output
        .iter()
        .rposition(|b| *b == b'\n')
        .filter(|_| !page.eof);
    let keep = match line {
        Some(at) => at + 1,
        None => output.len() - torn_bytes(output),
    };
    if keep > 0 && keep < output.len() {
        page.next_offset -= (output.len() - keep) as u64;
        page.eof = false;
        output.truncate(keep);
    }
    page
}

fn event(session: &SessionId, event: &Event) -> String {
    let detail: Value = serde_json::from_str(&event.detail).unwrap_or_default();
    json!({
        "session_id": session.as_str(),
        "seq": event.seq,
        "at_unix_ms": event.at,
        "event": event.kind,
        "detail": detail,
    })
    .to_string()
}

fn number(number: i64) -> Result<u64, Status> {
    u64::try_from(number).map_err(|_| {
        model_status(Error::invalid(format!(
            "{number} is no offset and no limit: use 0 or more"
        )))
    })
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(output: &[u8], eof: bool, want: &[u8], want_eof: bool) {
        let page = whole_lines(TranscriptPage {
            output: output.to_vec(),
            offset: 100,
            next_offset: 100 + output.len() as u64,
            truncated_before: false,
            eof,
        });
        assert_eq!((&*page.output, page.eof), (want, want_eof));
        assert_eq!(page.next_offset, 100 + want.len() as u64);
    }

    #[test]
    fn pages_end_with_a_line_or_a_character() {
        check(b"a\nb", false, b"a\n", false);
        check(b"a\nb", true, b"a\nb", true);
        check(b"abc", false, b"abc", false);
        check("abé".as_bytes().split_at(3).0, true, b"ab", false);
        check(b"\xc3", true, b"\xc3", true);
        check(b"", true, b"", true);
        check(b"\xff\xff", false, b"\xff\xff", false);
    }
}
