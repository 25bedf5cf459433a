//! The Connect protocol (connectrpc.com) with JSON messages: unary calls, and streams of enveloped messages.
//!
//! Errors of a stream come in its last message, with HTTP status 200: E2B's JavaScript client reads nothing else.

use super::body::{self, Answer, BoxError, MESSAGE_BYTES_MAX, Upload};
use super::error::{Failure, NOT_FOUND, is_gone};
use bytes::{Buf as _, Bytes, BytesMut};
use futures::Stream;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use k8e_model::Code;
use k8e_net::multipart::Chunks as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::time::Duration;

/// Flags of an envelope.
const COMPRESSED: u8 = 1;
const END_STREAM: u8 = 2;

/// Flags and length before a message.
const ENVELOPE_BYTES: usize = 5;

const STREAM: HeaderValue = HeaderValue::from_static("application/connect+json");

/// Seconds between keepalives when the client says nothing, and the longest that it may ask for.
const KEEPALIVE_DEFAULT_S: u64 = 90;
const KEEPALIVE_MAX_S: u64 = 3600;

/// What a request says about its call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rpc {
    /// Whether messages are enveloped.
    pub(super) streaming: bool,
    /// How long the call may take.
    pub(super) timeout: Option<Duration>,
    /// Silence after which a keepalive is sent.
    pub(super) keepalive: Duration,
}

/// An error of a call: a Connect code, and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Error {
    pub(super) code: &'static str,
    pub(super) message: String,
}

/// Decoder of enveloped messages.
#[derive(Default)]
pub(super) struct Envelopes {
    buffer: BytesMut,
}

// === impl Rpc ===

impl Rpc {
    pub(super) fn new(headers: &HeaderMap) -> Result<Self, Failure> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let kind = text(CONTENT_TYPE.as_str()).unwrap_or_default();
        let streaming = match kind.split(';').next().unwrap_or_default().trim() {
            "application/json" => false,
            "application/connect+json" => true,
            _ => {
                let message = "use application/json, or application/connect+json for streams";
                return Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
            }
        };
        for name in ["content-encoding", "connect-content-encoding"] {
            if text(name).is_some_and(|encoding| encoding != "identity") {
                return Err(Failure::new(
                    StatusCode::UNSUPPORTED_MEDIA_TYPE,
                    "compressed messages are not supported",
                ));
            }
        }
        let number = |name: &str| text(name).and_then(|text| text.parse::<u64>().ok());
        let keepalive = number("keepalive-ping-interval").unwrap_or(KEEPALIVE_DEFAULT_S);
        Ok(Self {
            streaming,
            timeout: number("connect-timeout-ms").map(Duration::from_millis),
            keepalive: Duration::from_secs(keepalive.clamp(1, KEEPALIVE_MAX_S)),
        })
    }

    /// The one message of a request.
    pub(super) async fn message<T: DeserializeOwned>(self, upload: Upload) -> Result<T, Error> {
        let body = upload
            .whole()
            .await
            .map_err(|failure| Error::invalid(failure.message))?;
        let body = match self.streaming {
            false => body,
            true => {
                let mut envelopes = Envelopes::default();
                envelopes.push(&body);
                let message = envelopes.next()?;
                message.ok_or_else(|| Error::invalid("the request is not a whole message"))?
            }
        };
        decode(&body)
    }
}

/// A message from its JSON; an empty one is an empty object.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body)
        .map_err(|error| Error::invalid(format!("the message is not as expected: {error}")))
}

/// The answer to a unary call.
pub(super) fn unary(result: Result<impl Serialize, Error>) -> Result<Answer, Failure> {
    match result {
        Ok(message) => body::json(StatusCode::OK, &message),
        Err(error) if error.is_gone() => Err(Failure::new(StatusCode::BAD_GATEWAY, error.message)),
        Err(error) => body::json(
            error.status(),
            &json!({ "code": error.code, "message": error.message }),
        ),
    }
}

/// An answer that is a stream of messages.
pub(super) fn stream(
    frames: impl Stream<Item = Result<Bytes, BoxError>> + Send + 'static,
) -> Answer {
    body::streamed(STREAM, frames)
}

/// A stream that has ended with an error before its first message.
pub(super) fn failed_stream(error: &Error) -> Answer {
    let frame = end(Some(error));
    stream(futures::stream::once(async move { Ok(frame) }))
}

/// A message in its envelope.
pub(super) fn frame(message: &impl Serialize) -> Bytes {
    envelope(0, &serde_json::to_vec(message).unwrap_or_default())
}

/// The last message of a stream.
pub(super) fn end(error: Option<&Error>) -> Bytes {
    let text = match error {
        None => json!({}),
        Some(Error { code, message }) => json!({ "error": { "code": code, "message": message } }),
    };
    envelope(END_STREAM, text.to_string().as_bytes())
}

fn envelope(flags: u8, message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = BytesMut::with_capacity(ENVELOPE_BYTES + message.len());
    frame.extend_from_slice(&[flags]);
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(message);
    frame.freeze()
}

/// Messages of a client's stream, as they arrive.
pub(super) struct Messages {
    upload: Upload,
    envelopes: Envelopes,
}

// === impl Messages ===

impl Messages {
    pub(super) fn new(upload: Upload) -> Self {
        Self {
            upload,
            envelopes: Envelopes::default(),
        }
    }

    /// The next message; none at the end.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Error> {
        loop {
            if let Some(message) = self.envelopes.next()? {
                return decode(&message).map(Some);
            }
            let data = self.upload.next().await;
            match data.map_err(|failure| Error::invalid(failure.message))? {
                Some(data) => self.envelopes.push(&data),
                None if self.envelopes.is_empty() => return Ok(None),
                None => return Err(Error::invalid("the stream ends inside a message")),
            }
        }
    }
}

// === impl Envelopes ===

impl Envelopes {
    pub(super) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// The next message that is whole.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let Some((head, _)) = self.buffer.split_first_chunk::<ENVELOPE_BYTES>() else {
            return Ok(None);
        };
        let [flags, length @ ..] = *head;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if flags & COMPRESSED != 0 {
            return Err(Error::invalid("compressed messages are not supported"));
        }
        if length > MESSAGE_BYTES_MAX {
            return Err(Error::invalid(format!(
                "a message of {length} bytes, at most {MESSAGE_BYTES_MAX} are allowed"
            )));
        }
        if self.buffer.len() < ENVELOPE_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(ENVELOPE_BYTES);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }

    fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

// === impl Error ===

impl Error {
    pub(super) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid_argument", message)
    }

    pub(super) fn deadline() -> Self {
        Self::new(
            "deadline_exceeded",
            "the command did not end within its timeout",
        )
    }

    pub(super) fn of(error: &k8e_engine::Error) -> Self {
        if is_gone(error) {
            return Self::gone();
        }
        // E2B's clients take a precondition for a wrong argument.
        if let k8e_engine::Error::InputClosed(_) = error {
            return Self::new("internal", error.to_string());
        }
        Self::new(name(error.code()), error.to_string())
    }

    /// The sandbox ended or was paused.
    pub(super) fn gone() -> Self {
        Self::new("unavailable", NOT_FOUND)
    }

    pub(super) fn of_code(code: Code, message: String) -> Self {
        match code == Code::Unavailable {
            true => Self::gone(),
            false => Self::new(name(code), message),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.message == NOT_FOUND
    }

    fn status(&self) -> StatusCode {
        match self.code {
            "invalid_argument" | "failed_precondition" => StatusCode::BAD_REQUEST,
            "unauthenticated" => StatusCode::UNAUTHORIZED,
            "permission_denied" => StatusCode::FORBIDDEN,
            "not_found" => StatusCode::NOT_FOUND,
            "already_exists" => StatusCode::CONFLICT,
            "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
            "unimplemented" => StatusCode::NOT_IMPLEMENTED,
            "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let code = match failure.status {
            StatusCode::UNAUTHORIZED => "unauthenticated",
            StatusCode::BAD_REQUEST => "invalid_argument",
            StatusCode::NOT_IMPLEMENTED => "unimplemented",
            _ => "internal",
        };
        Self::new(code, failure.message)
    }
}

fn name(code: Code) -> &'static str {
    match code {
        Code::Invalid => "invalid_argument",
        Code::NotFound => "not_found",
        Code::Exists => "already_exists",
        Code::Precondition => "failed_precondition",
        Code::Exhausted => "resource_exhausted",
        Code::Denied => "permission_denied",
        Code::Unauthenticated => "unauthenticated",
        Code::Unsupported => "unimplemented",
        Code::Timeout => "deadline_exceeded",
        Code::Unavailable => "unavailable",
        Code::Internal => "internal",
    }
}

/// For the crate `fuzz`.
pub(crate) mod fuzzing {
    use super::{ENVELOPE_BYTES, Envelopes, MESSAGE_BYTES_MAX};

    /// Feeds a client's stream to the decoder in two chunks. Whatever it is, messages are within the limit, and what the
    /// decoder takes does not depend on how the stream was cut. Returns the number of messages, and whether it is refused.
    pub fn connect_envelopes(data: &[u8]) -> (usize, bool) {
        let messages = |cut: usize| {
            let (mut envelopes, mut all) = (Envelopes::default(), Vec::new());
            let mut failed = false;
            for part in [&data[..cut], &data[cut..]] {
                envelopes.push(part);
                while !failed {
                    match envelopes.next() {
                        Ok(Some(message)) => all.push(message),
                        Ok(None) => break,
                        Err(_) => failed = true,
                    }
                }
            }
            assert!(all.iter().all(|message| message.len() <= MESSAGE_BYTES_MAX));
            (all, failed)
        };
        let whole = messages(0);
        for cut in [
            data.len() / 2,
            data.len().min(ENVELOPE_BYTES - 1),
            data.len(),
        ] {
            assert_eq!(messages(cut), whole, "cut at {cut}");
        }
        (whole.0.len(), whole.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_come_in_any_pieces() {
        let mut envelopes = Envelopes::default();
        let sent = [frame(&json!({"a": 1})), frame(&json!({})), end(None)].concat();
        let mut got = Vec::new();
        for byte in &sent {
            envelopes.push(&[*byte]);
            while let Some(message) = envelopes.next().unwrap() {
                got.push(String::from_utf8(message.to_vec()).unwrap());
            }
        }
        assert_eq!(got, [r#"{"a":1}"#, "{}", "{}"]);
        assert!(envelopes.is_empty());
    }

    #[test]
    fn bad_envelopes_are_refused() {
        let next = |bytes: &[u8]| {
            let mut envelopes = Envelopes::default();
            envelopes.push(bytes);
            envelopes.next()
        };
        assert_eq!(next(&[0, 0, 0]), Ok(None));
        assert_eq!(next(&[0, 0, 0, 0, 2, b'{']), Ok(None));
        assert!(next(&[1, 0, 0, 0, 0]).is_err());
        assert!(next(&[0, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
