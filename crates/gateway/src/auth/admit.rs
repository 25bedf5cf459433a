//! The layer at which calls are let in, and ended when what their caller proved himself with is
//! taken back: a command that runs for hours must not outlive the key it was started with.

use super::{Credential, Doorkeeper};
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

/// What is taken back is told at once; what expires is noticed by then.
const RECHECK_EVERY: Duration = Duration::from_secs(30);

/// Puts [`Admit`] around a service.
#[derive(Clone)]
pub(crate) struct AdmitLayer(pub(crate) Doorkeeper);

/// Lets calls in, or answers why not.
#[derive(Clone)]
pub(crate) struct Admit<S> {
    inner: S,
    keeper: Doorkeeper,
}

/// Resolves, with what to say, when a credential does not count any more.
type TakenBack = BoxFuture<'static, Status>;

/// An answer that ends when its caller's credential does not count any more.
struct Guarded {
    /// None when it was cut off.
    inner: Option<Body>,
    taken_back: TakenBack,
}

// === impl AdmitLayer ===

impl<S> Layer<S> for AdmitLayer {
    type Service = Admit<S>;
    fn layer(&self, inner: S) -> Admit<S> {
        Admit {
            inner,
            keeper: self.0.clone(),
        }
    }
}

// === impl Admit ===

impl<S> Service<Request<Body>> for Admit<S>
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
        let (who, credential) = match self.keeper.admit(&request) {
            Ok(known) => known,
            Err(refused) => return std::future::ready(Ok(refused.into_http())).boxed(),
        };
        request.extensions_mut().insert(who);
        request.extensions_mut().insert(credential.clone());
        let answer = self.inner.call(request);
        if matches!(credential, Credential::Kernel) {
            return answer.boxed();
        }
        let taken_back = taken_back(self.keeper.clone(), credential).boxed();
        guard(answer, taken_back).boxed()
    }
}

async fn guard<E>(
    answer: impl Future<Output = Result<Response<Body>, E>>,
    taken_back: TakenBack,
) -> Result<Response<Body>, E> {
    match select(pin!(answer), taken_back).await {
        Either::Left((answer, taken_back)) => Ok(answer?.map(|inner| {
            Body::new(Guarded {
                inner: Some(inner),
                taken_back,
            })
        })),
        Either::Right((status, _)) => Ok(status.into_http()),
    }
}

async fn taken_back(keeper: Doorkeeper, credential: Credential) -> Status {
    let mut changes = keeper.sessions().credentials();
    loop {
        if let Err(status) = keeper.recheck(&credential) {
            return status;
        }
        // A sender that is gone took the server with it, which ends this too.
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
        if let Poll::Ready(status) = this.taken_back.poll_unpin(context) {
            // What makes the answer goes with it, and so does what it does in a sandbox.
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
