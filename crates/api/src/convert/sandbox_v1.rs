//! `sandbox.v1` messages to model types and back: the defaults and limits of the Go K8E, and the texts that its clients match.

mod exec;
mod pip;
mod session;
mod terminal;

pub use exec::{background_command, command, exec_response, poll_response};
pub use pip::pip_command;
pub use session::{allowed_hosts, session, session_spec};
pub use terminal::{signal_name, signal_number, terminal_command, terminal_grace, terminal_size};

use k8e_model::{ApprovalId, Code, Error, RunId, SessionId, TerminalId};
use std::str::FromStr;

/// Bytes of each output stream of a command, as `sandbox.v1` clients expect. It bounds the text: invalid bytes become three
/// each, and grpc-js takes 4 MiB in one message.
pub const OUTPUT_BYTES_MAX: u64 = 1024 * 1024;

/// Characters of a name that is repeated in an error.
const SHOWN_CHARS_MAX: usize = 128;

/// The session that a call names.
pub fn session_id(text: &str) -> Result<SessionId, Error> {
    id(text, "session")
}

/// The run that a call names.
pub fn run_id(text: &str) -> Result<RunId, Error> {
    id(text, "run")
}

/// The terminal that a call names.
pub fn terminal_id(text: &str) -> Result<TerminalId, Error> {
    id(text, "terminal")
}

/// The approval that a call names.
pub fn approval_id(text: &str) -> Result<ApprovalId, Error> {
    id(text, "approval")
}

/// What the mode of a write asks for: whether to append, and the file's permissions (0 is the
/// default). The Go server takes every other word for `w`, and manifests send permissions here.
pub fn write_mode(mode: &str) -> (bool, u32) {
    let octal = (3..=4).contains(&mode.len()) && mode.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let permissions = octal.then(|| u32::from_str_radix(mode, 8).ok()).flatten();
    (mode == "a", permissions.unwrap_or(0))
}

/// Bytes as text of at most so many bytes, and whether some were cut. Invalid bytes are replaced (U+FFFD).
pub fn text(bytes: Vec<u8>, bytes_max: u64) -> (String, bool) {
    let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
    let mut text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    };
    let cut = text.len() > bytes_max;
    text.truncate(text.floor_char_boundary(bytes_max));
    (text, cut)
}

/// An invalid id is `not found`, not invalid: `sandbox.v1` clients match that text.
fn id<T: FromStr<Err = Error>>(text: &str, noun: &str) -> Result<T, Error> {
    if text.is_empty() {
        return Err(Error::invalid(format!("{noun}_id required")));
    }
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
        Error::new(Code::NotFound, format!("{noun} {shown} not found"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_name_is_not_found() {
        let probe = session_id("healthcheck-probe-noop").unwrap();
        assert_eq!(probe.as_str(), "healthcheck-probe-noop");
        let error = session_id("No Such/../Session").unwrap_err();
        assert_eq!(error.code, Code::NotFound);
        assert_eq!(error.message, "session No Such/../Session not found");
        assert!(terminal_id(&"é".repeat(5000)).unwrap_err().message.len() < 400);
        let empty = run_id("").unwrap_err();
        assert_eq!(
            (empty.code, &*empty.message),
            (Code::Invalid, "run_id required")
        );
    }

    #[test]
    fn modes_of_a_write() {
        let modes = ["", "w", "a", "0755", "644", "0999", "x", "07777", "wa"];
        let read = modes.map(write_mode);
        let plain = (false, 0);
        let want = [
            plain,
            plain,
            (true, 0),
            (false, 0o755),
            (false, 0o644),
            plain,
            plain,
            plain,
            plain,
        ];
        assert_eq!(read, want);
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(text(b"abc".to_vec(), 3), ("abc".to_owned(), false));
        assert_eq!(text("éé".into(), 3), ("é".to_owned(), true));
        assert_eq!(text(vec![0xff, b'a'], 10), ("\u{fffd}a".to_owned(), false));
        // What grows by being replaced is bounded too.
        let (grown, cut) = text(vec![0xff; 100], 100);
        assert_eq!((grown.chars().count(), cut), (33, true));
    }
}
