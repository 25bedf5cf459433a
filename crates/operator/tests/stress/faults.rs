//! Fault injection in the API client: conflicts, 429, lost responses, interrupted watches.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as HttpBody, Frame};
use hyper::{Method, Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tower::{BoxError, Layer, Service};

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// Faults to inject.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Faults {
    /// No faults.
    None,
    /// All faults, at random.
    Storm,
    /// Permanent: pods cannot be read, sandboxes neither changed nor created.
    Stubborn,
}

/// A client with these faults.
pub(crate) fn client(config: Config, faults: Faults) -> Client {
    let builder = ClientBuilder::try_from(config).expect("a client");
    match faults {
        Faults::None => builder.build(),
        Faults::Storm | Faults::Stubborn => builder.with_layer(&faults).build(),
    }
}

#[derive(Clone)]
pub(crate) struct Faulty<S> {
    inner: S,
    faults: Faults,
}

impl<S> Layer<S> for Faults {
    type Service = Faulty<S>;

    fn layer(&self, inner: S) -> Faulty<S> {
        Faulty {
            inner,
            faults: *self,
        }
    }
}

impl<S, B> Service<Request<Body>> for Faulty<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Answer;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if self.faults == Faults::Stubborn {
            let refused = stubborn(&request);
            let answer = self.inner.call(request);
            return Box::pin(async move {
                match refused {
                    Some(refused) => Ok(refused),
                    None => {
                        let answer = answer.await.map_err(Into::into)?;
                        Ok(answer.map(|body| Cut::new(body, None).boxed_unsync()))
                    }
                }
            });
        }
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let writes = request.method() != Method::GET;
        match chance() {
            0..4 if writes => return Box::pin(async { Ok(refused(409, "Conflict")) }),
            4..8 => return Box::pin(async { Ok(refused(429, "TooManyRequests")) }),
            _ => {}
        }
        // The request is carried out, and its response is lost.
        let lost = writes && chance() < 3;
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await.map_err(Into::into)?;
            if lost {
                return Err("the answer was lost".into());
            }
            let cut_after = is_watch.then(|| Duration::from_millis(200 + 20 * u64::from(chance())));
            Ok(answer.map(|body| Cut::new(body, cut_after).boxed_unsync()))
        })
    }
}

fn stubborn(request: &Request<Body>) -> Option<Answer> {
    let path = request.uri().path();
    let method = request.method();
    if method == Method::GET && path.contains("/pods/") {
        return Some(refused(500, "InternalError"));
    }
    if method == Method::PATCH && path.contains("/sandboxes/") && !path.ends_with("/status") {
        return Some(refused(409, "Conflict"));
    }
    if method == Method::POST && path.ends_with("/sandboxes") {
        return Some(refused(409, "AlreadyExists"));
    }
    None
}

/// A random number below 100.
fn chance() -> u8 {
    let number = getrandom::u32().expect("random numbers");
    u8::try_from(number % 100).expect("below 100")
}

fn refused(code: u16, reason: &str) -> Answer {
    let text = format!(
        r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"injected","reason":"{reason}","code":{code}}}"#
    );
    let body = Full::from(text)
        .map_err(|never| match never {})
        .boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = hyper::StatusCode::from_u16(code).expect("a status");
    response
}

/// A body that is cut off.
struct Cut {
    inner: UnsyncBoxBody<Bytes, BoxError>,
    end: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Cut {
    fn new<B>(body: B, after: Option<Duration>) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self {
            inner: body.map_err(Into::into).boxed_unsync(),
            end: after.map(|after| Box::pin(tokio::time::sleep(after))),
        }
    }
}

impl HttpBody for Cut {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(end) = &mut self.end
            && end.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.inner).poll_frame(context)
    }
}
