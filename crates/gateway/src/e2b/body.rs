//! Bodies of requests, bounded in size and time, and of answers.

use super::error::Failure;
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use k8e_net::multipart::Chunks;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::error::Error as StdError;
use std::time::Duration;
use tokio::time::timeout;

/// Size of a request of the control API, and of a message to `envd`: input of a command is the largest, base64-encoded.
pub(super) const MESSAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// A client that sends nothing for this long is not waited for. E2B's clients send keepalives every 50 seconds where they
/// may be silent.
const IDLE_WITHIN: Duration = Duration::from_secs(180);

const JSON: HeaderValue = HeaderValue::from_static("application/json");

pub(super) type BoxError = Box<dyn StdError + Send + Sync>;
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;
pub(super) type Answer = Response<Body>;

/// The body of a request, chunk by chunk.
pub(super) struct Upload(pub(super) Incoming);

// === impl Upload ===

impl Chunks for Upload {
    type Error = Failure;

    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = timeout(IDLE_WITHIN, self.0.frame()).await.map_err(|_| {
                Failure::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "the request body did not arrive in time",
                )
            })?;
            match frame {
                None => return Ok(None),
                Some(Err(_)) => return Err(Failure::invalid("the request body ended early")),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Ok(Some(data)),
                    // Empty, or trailers.
                    Ok(_) | Err(_) => {}
                },
            }
        }
    }
}

impl Upload {
    /// All of it, up to [`MESSAGE_BYTES_MAX`].
    pub(super) async fn whole(mut self) -> Result<Bytes, Failure> {
        let mut all = BytesMut::new();
        while let Some(data) = self.next().await? {
            if all.len() + data.len() > MESSAGE_BYTES_MAX {
                let message = format!("the request is larger than {MESSAGE_BYTES_MAX} bytes");
                return Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message));
            }
            all.extend_from_slice(&data);
        }
        Ok(all.freeze())
    }

    /// All of it as JSON; an empty body is an empty object.
    pub(super) async fn json<T: DeserializeOwned>(self) -> Result<T, Failure> {
        let body = self.whole().await?;
        let body = if body.is_empty() { &b"{}"[..] } else { &body };
        serde_json::from_slice(body)
            .map_err(|error| Failure::invalid(format!("the request is not as expected: {error}")))
    }
}

pub(super) fn empty(status: StatusCode) -> Answer {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}

pub(super) fn full(status: StatusCode, kind: HeaderValue, data: impl Into<Bytes>) -> Answer {
    let body = Full::new(data.into())
        .map_err(|never| match never {})
        .boxed_unsync();
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Result<Answer, Failure> {
    let text = serde_json::to_vec(value)
        .map_err(|error| Failure::internal(format!("cannot write the answer: {error}")))?;
    Ok(full(status, JSON, text))
}

pub(super) fn streamed(
    kind: HeaderValue,
    stream: impl Stream<Item = Result<Bytes, BoxError>> + Send + 'static,
) -> Answer {
    use futures::TryStreamExt as _;
    let body = StreamBody::new(stream.map_ok(Frame::data)).boxed_unsync();
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
