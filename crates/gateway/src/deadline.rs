//! A call whose deadline passed is told so.
//!
//! tonic ends it too, but says `Cancelled`; a client whose own clock is a moment behind the server's
//! would take that for something else than its deadline. This timer starts before tonic's and is asked
//! first, so it is always the one that answers.

use futures::future::BoxFuture;
use k8e_api::status::to_status;
use k8e_model::Code;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};

/// gRPC's own bound.
const DIGITS_MAX: usize = 8;

/// Puts [`Deadline`] around a service.
#[derive(Clone, Copy)]
pub(crate) struct DeadlineLayer;

/// Ends calls at the deadline that their client gave.
#[derive(Clone)]
pub(crate) struct Deadline<S>(S);

// === impl DeadlineLayer ===

impl<S> Layer<S> for DeadlineLayer {
    type Service = Deadline<S>;
    fn layer(&self, inner: S) -> Deadline<S> {
        Deadline(inner)
    }
}

// === impl Deadline ===

impl<S, B> Service<Request<B>> for Deadline<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let within = timeout(request.headers());
        // Now, not when it is first polled.
        let deadline = within.and_then(|within| Instant::now().checked_add(within));
        let answer = self.0.call(request);
        let Some(deadline) = deadline else {
            return Box::pin(answer);
        };
        Box::pin(async move {
            timeout_at(deadline, answer).await.unwrap_or_else(|_| {
                let status = to_status(Code::Timeout, "the deadline of the call passed");
                Ok(status.into_http())
            })
        })
    }
}

/// What a client gives a call: digits and a unit. What is none is ignored, as tonic does.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > DIGITS_MAX || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::{ServiceExt as _, service_fn};

    fn parsed(text: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().unwrap());
        timeout(&headers)
    }

    #[test]
    fn deadlines_are_read() {
        assert_eq!(parsed("1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parsed("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parsed("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(parsed("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parsed("7u"), Some(Duration::from_micros(7)));
        assert_eq!(parsed("7n"), Some(Duration::from_nanos(7)));
        for bad in ["", "5", "S", "-1S", "999999999S", "1x", "+1S"] {
            assert_eq!(parsed(bad), None, "{bad:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_late_is_told_so() {
        let never = service_fn(async |_: Request<()>| -> Result<Response<Body>, ()> {
            std::future::pending().await
        });
        let request = Request::builder()
            .header("grpc-timeout", "3S")
            .body(())
            .unwrap();
        let begun = Instant::now();
        let late = Deadline(never).oneshot(request).await.unwrap();
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
        assert_eq!(late.headers()["grpc-status"], "4");
    }
}
