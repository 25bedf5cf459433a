//! Transcripts and events.

use crate::k8e_v1::{engine_status, model_status};
use crate::text::torn_bytes;
use k8e_api::convert::sandbox_v1;
use k8e_api::sandbox_v1 as pb;
use k8e_engine::{Event, Sessions, TranscriptPage};
use k8e_model::{Error, Principal, SessionId};
use serde_json::{Value, json};
use tonic::Status;

/// Events of an answer when the request sets no number, as in the Go server.
const EVENTS_DEFAULT: usize = 500;

/// More than a session keeps.
const EVENTS_MAX: u32 = 1000;

/// The Go server's transcripts are always empty: its agent writes none.
pub(super) async fn transcript(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::GetTranscriptRequest,
) -> Result<pb::GetTranscriptResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let (offset, limit) = (number(request.offset)?, number(request.limit)?);
    let page = sessions.transcript(who, &id, offset, limit).await;
    let page = whole_lines(page.map_err(engine_status)?);
    Ok(pb::GetTranscriptResponse {
        session_id: request.session_id.clone(),
        output: String::from_utf8_lossy(&page.output).into_owned(),
        offset: signed(page.offset),
        next_offset: signed(page.next_offset),
        truncated_before: page.truncated_before,
        eof: page.eof,
    })
}

/// The newest events of this session. Those of the Go server are of all sessions that used the sandbox.
pub(super) async fn events(
    sessions: &Sessions,
    who: &Principal,
    request: &pb::GetEventsRequest,
) -> Result<pb::GetEventsResponse, Status> {
    let id = sandbox_v1::session_id(&request.session_id).map_err(model_status)?;
    let limit = match usize::try_from(number(request.limit)?).unwrap_or(usize::MAX) {
        0 => EVENTS_DEFAULT,
        limit => limit,
    };
    let page = sessions.events(who, &id, 0, EVENTS_MAX).await;
    let page = page.map_err(engine_status)?;
    let older = page.events.len().saturating_sub(limit);
    let events: Vec<_> = page.events[older..].iter().map(|e| event(&id, e)).collect();
    Ok(pb::GetEventsResponse {
        truncated: page.truncated || older > 0,
        returned: i64::try_from(events.len()).unwrap_or(i64::MAX),
        events,
    })
}

/// Ends a page at the end of a line, so that no character is split between two pages. A page without the end of a line,
/// or the newest, ends with a whole character; a page that is only part of one is sent as it is, or a client would ask for
/// it for ever.
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
