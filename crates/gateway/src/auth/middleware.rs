//! Authentication middleware (a tower layer): authenticates calls, and ends them when their credential is revoked.
//!
//! A command that runs for hours must not outlive the key it was started with.

use super::{Authenticator, Credential};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Either, select};
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};

/// A revocation is noticed at once, by a signal of the engine; expiry by this interval.
const RECHECK_EVERY: Duration = Duration::from_secs(30);

/// Puts [`Auth`] around a service.
#[derive(Clone)]
pub(crate) struct AuthLayer(pub(crate) Authenticator);

/// Passes authenticated calls on, and answers the others with why not.
#[derive(Clone)]
pub(crate) struct Auth<S> {
    inner: S,
    authenticator: Authenticator,
}

/// Resolves, with the status for the client, when a credential is no longer valid.
type Revoked = BoxFuture<'static, Status>;

/// The body of an answer, which ends when the credential of its call is no longer valid.
struct Guarded {
    /// None once it was ended.
    inner: Option<Body>,
    revoked: Revoked,
}

// === impl AuthLayer ===

impl<S> Layer<S> for AuthLayer {
    type Service = Auth<S>;
    fn layer(&self, inner: S) -> Auth<S> {
        Auth {
            inner,
            authenticator: self.0.clone(),
        }
    }
}

// === impl Auth ===

impl<S> Service<Request<Body>> for Auth<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let (who, credential) = match self.authenticator.admit(&request) {
            Ok(known) => known,
            Err(refused) => return std::future::ready(Ok(refused.into_http())).boxed(),
        };
        request.extensions_mut().insert(who);
        request.extensions_mut().insert(credential.clone());
        let answer = self.inner.call(request);
        if matches!(credential, Credential::Kernel) {
            return answer.boxed();
        }
        let revoked = revoked(self.authenticator.clone(), credential).boxed();
        guard(answer, revoked).boxed()
    }
}

async fn guard<E>(
    answer: impl Future<Output = Result<Response<Body>, E>>,
    revoked: Revoked,
) -> Result<Response<Body>, E> {
    match select(pin!(answer), revoked).await {
        Either::Left((answer, revoked)) => Ok(answer?.map(|inner| {
            Body::new(Guarded {
                inner: Some(inner),
                revoked,
            })
        })),
        Either::Right((status, _)) => Ok(status.into_http()),
    }
}

async fn revoked(authenticator: Authenticator, credential: Credential) -> Status {
    let mut changes = authenticator.sessions().credentials();
    loop {
        if let Err(status) = authenticator.recheck(&credential) {
            return status;
        }
        // An error: the sender is dropped, and with it the server, which ends this too.
        let _ = tokio::time::timeout(RECHECK_EVERY, changes.changed()).await;
    }
}

// === impl Guarded ===

impl HttpBody for Guarded {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(status) = this.revoked.poll_unpin(context) {
            // Dropping the body ends the call behind it, and what that does in a sandbox.
            this.inner = None;
            let mut trailers = HeaderMap::new();
            return Poll::Ready(Some(match status.add_header(&mut trailers) {
                Ok(()) => Ok(Frame::trailers(trailers)),
                Err(status) => Err(status),
            }));
        }
        Pin::new(inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Some(inner) => inner.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}
