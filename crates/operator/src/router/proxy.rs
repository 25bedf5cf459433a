//! One request on its way: for which sandbox, whether it may, where that is, there and back.

mod headers;
mod pool;
mod tunnel;

use super::answer::Refusal;
use super::authz::Authorizer;
use super::body::{Answer, AnyBody, Capped, Timed};
use super::index::{Found, Index, Missing};
use super::metrics::{self, Counted};
use super::options::Options;
use super::serve::InUse;
use super::target::{self, Rules, Target};
use ::metrics::SharedString;
use headers::Kind;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri};
use pool::{Dialled, NoConnection, Pool, Upstream};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// What is served to callers.
pub(super) struct Proxy {
    options: Options,
    index: Arc<Index>,
    authorizer: Authorizer,
    pool: Arc<Pool>,
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) address: IpAddr,
    pub(super) tls: bool,
}

/// A request that may be passed on, and what is known about it.
struct Passage {
    target: Target,
    kind: Kind,
    deadline: Instant,
    /// Whether the body was larger than it may be.
    too_large: Arc<AtomicBool>,
}

/// Everything that ends with a request.
struct Tally {
    counted: Counted,
    _in_use: InUse,
}

// === impl Proxy ===

impl Proxy {
    pub(super) fn new(options: Options, index: Arc<Index>, authorizer: Authorizer) -> Self {
        let pool = Arc::new(Pool::new(options.max_connections as usize));
        Self {
            options,
            index,
            authorizer,
            pool,
        }
    }

    pub(super) fn options(&self) -> &Options {
        &self.options
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Answers one request.
    pub(super) async fn handle(
        &self,
        request: Request<Incoming>,
        caller: Caller,
        in_use: InUse,
    ) -> Answer {
        let mut tally = Tally {
            counted: Counted::new(request.method()),
            _in_use: in_use,
        };
        let grpc = headers::is_grpc(&request);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let request_id = headers::request_id(&request);
        let begun = Instant::now();
        // Boxed: the state of a request is large, and waits in the connection's task.
        let passed = Box::pin(self.pass(request, caller, &mut tally)).await;
        let (status, answer) = match passed {
            Ok(passed) => (passed.status(), Ok(passed)),
            Err(refusal) => (refusal.status(), Err(refusal)),
        };
        tally.counted.code = status.as_u16();
        if self.options.access_log {
            tracing::info!(
                %method, path, request_id, status = status.as_u16(), caller = %caller.address,
                millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                "request"
            );
        }
        match answer {
            Ok(passed) => passed.into_answer(tally),
            Err(refusal) => refusal.answer(grpc),
        }
    }

    async fn pass(
        &self,
        mut request: Request<Incoming>,
        caller: Caller,
        tally: &mut Tally,
    ) -> Result<Passed, Refusal> {
        let (passage, uri) = self.admit(&request, tally).await?;
        let callers_end = (passage.kind == Kind::Upgrade).then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        if let Some(uri) = uri {
            parts.uri = uri;
        }
        headers::to_sandbox(&mut parts, passage.kind, caller);
        let body = self.checked_body(&parts.headers, body, &passage)?;
        let request = Request::from_parts(parts, body);
        let (answer, upstream) = self.ask(&passage, request).await?;
        let mut passed = Passed {
            answer,
            upstream,
            pool: Arc::clone(&self.pool),
            deadline: passage.deadline,
            tunnel: None,
            tunnel_idle: self.options.websocket_idle_timeout,
        };
        passed.finish(passage.kind, callers_end)?;
        Ok(passed)
    }

    /// Reads what is asked for, and whether it may be.
    async fn admit(
        &self,
        request: &Request<Incoming>,
        tally: &mut Tally,
    ) -> Result<(Passage, Option<Uri>), Refusal> {
        if request.method() == Method::CONNECT {
            let detail = "CONNECT is not served: the router reaches sandboxes only.";
            return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, detail));
        }
        let kind = headers::kind(request);
        let (target, uri) = self.target(request, kind)?;
        let label = SharedString::from(self.label(&target).to_owned());
        tally.counted.namespace = label.clone();
        let authorized = self.authorizer.authorize(request.headers(), &target).await;
        metrics::authz_decision(label, authorized.is_ok());
        authorized.map_err(|denied| {
            tracing::info!(
                "{denied:?}: a request for sandbox {}/{}",
                target.namespace,
                target.name
            );
            denied.refusal()
        })?;
        let limit = self.options.proxy_timeout;
        let within = target.timeout.map_or(limit, |asked| asked.min(limit));
        let passage = Passage {
            target,
            kind,
            deadline: Instant::now() + within,
            too_large: Arc::default(),
        };
        Ok((passage, uri))
    }

    fn target(
        &self,
        request: &Request<Incoming>,
        kind: Kind,
    ) -> Result<(Target, Option<Uri>), Refusal> {
        let uri = request.uri();
        if let Some(prefix) = &self.options.path_routing_prefix
            && let Some(read) = target::from_path(uri.path(), prefix, request.headers())
        {
            let (target, mut path) = read?;
            if let Some(query) = uri.query() {
                path = format!("{path}?{query}");
            }
            let uri = path.parse();
            let uri = uri.map_err(|_| Refusal::new(StatusCode::BAD_REQUEST, "Invalid path."))?;
            return Ok((target, Some(uri)));
        }
        let rules = Rules {
            port_required: kind == Kind::Grpc,
            allow_loopback: self.options.allow_loopback_pod_ip,
        };
        Ok((target::from_headers(request.headers(), rules)?, None))
    }

    fn checked_body(
        &self,
        headers: &hyper::HeaderMap,
        body: Incoming,
        passage: &Passage,
    ) -> Result<AnyBody, Refusal> {
        let limit = self.options.max_request_body_bytes;
        let told = body
            .size_hint()
            .exact()
            .or_else(|| headers::content_length(headers));
        if limit == 0 {
            return Ok(UnsyncBoxBody::new(Timed::new(body, passage.deadline, ())));
        }
        if told.is_some_and(|told| told > limit) {
            return Err(too_large(limit));
        }
        let body = Capped::new(body, limit, Arc::clone(&passage.too_large));
        Ok(UnsyncBoxBody::new(Timed::new(body, passage.deadline, ())))
    }

    /// Sends it, and waits for the head of the answer.
    async fn ask(
        &self,
        passage: &Passage,
        request: Request<AnyBody>,
    ) -> Result<(Response<Incoming>, Upstream), Refusal> {
        let mut request = request;
        let mut stale = 0;
        loop {
            let dialled = timeout_at(passage.deadline, self.dial(passage)).await;
            let Dialled {
                mut upstream,
                reused,
            } = dialled.map_err(|_| self.late(passage))??;
            headers::address(&mut request, upstream.address(), passage.kind)?;
            let patience = Instant::now() + self.options.answer_within();
            let sent = timeout_at(passage.deadline.min(patience), upstream.send(request)).await;
            match sent {
                Ok(Ok(answer)) => return Ok((answer, upstream)),
                // It was closed before anything of the request was written: as if it had never been there.
                Ok(Err((_, Some(unsent)))) if reused && stale < pool::IDLE_PER_POD_MAX => {
                    request = unsent;
                    stale += 1;
                }
                Ok(Err((error, _))) => return Err(self.broken(passage, &error)),
                Err(_) => return Err(self.late(passage)),
            }
        }
    }

    /// A connection to the sandbox: dial failures, and nothing else, are tried again.
    async fn dial(&self, passage: &Passage) -> Result<Dialled, Refusal> {
        let target = &passage.target;
        let mut pause = self.options.upstream_retry_initial_delay;
        let mut attempts = 0;
        loop {
            let (pod, address) = self.locate(target).await?;
            let within = self.options.upstream_connect_timeout;
            let error = match self.pool.connect(&pod, address, passage.kind, within).await {
                Ok(dialled) => return Ok(dialled),
                Err(NoConnection::Full) => return Err(self.full(target)),
                Err(NoConnection::Dial(error)) => error,
            };
            let moved = self
                .index
                .find(target)
                .is_ok_and(|found| found.address != address.ip());
            if moved {
                metrics::cache_invalidation(self.label(target));
            }
            attempts += 1;
            if attempts > self.options.upstream_max_retries {
                metrics::upstream_error(self.label(target), "dial");
                tracing::info!(
                    "cannot connect to sandbox {}/{} at {address}: {error}",
                    target.namespace,
                    target.name
                );
                let why = format!(
                    "nothing accepts connections on port {} of its pod",
                    target.port
                );
                return Err(unreachable(target, &why));
            }
            metrics::upstream_retry(self.label(target));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(self.options.upstream_retry_max_delay);
        }
    }

    fn full(&self, target: &Target) -> Refusal {
        metrics::upstream_error(self.label(target), "full");
        let detail = format!(
            "The router has {} connections to sandboxes, which is all it may have (--max-connections): try again later.",
            self.options.max_connections
        );
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }

    /// Which pod, and where.
    async fn locate(&self, target: &Target) -> Result<(Box<str>, SocketAddr), Refusal> {
        let missing = match self.index.wait(target, self.options.resolve_timeout).await {
            Ok(Found { endpoint, address }) => {
                return Ok((
                    endpoint.pod_uid.clone(),
                    SocketAddr::new(address, target.port),
                ));
            }
            Err(missing) => missing,
        };
        // DNS knows nothing of UIDs: whoever wants that one sandbox is not sent to another.
        let by_name = target.pod_ip.is_none() && target.uid.is_none();
        if missing == Missing::Pod && self.options.dns_fallback && by_name {
            return self.ask_dns(target).await;
        }
        metrics::upstream_error(self.label(target), "no_pod");
        // 502 throughout: that is what makes clients forget an address that is no longer good.
        Err(unreachable(
            target,
            match missing {
                Missing::Pod => "no ready pod of it is known",
                Missing::OtherUid => {
                    "X-Sandbox-UID is not the UID of the sandbox that has this name now"
                }
            },
        ))
    }

    /// What the name of the sandbox's Service stands for. Only with --dns-fallback.
    async fn ask_dns(&self, target: &Target) -> Result<(Box<str>, SocketAddr), Refusal> {
        let domain = self.options.cluster_domain.trim_end_matches('.');
        // With the dot at its end, no search domain is put behind it.
        let name = format!("{}.{}.svc.{domain}.", target.name, target.namespace);
        let asked = tokio::net::lookup_host((name.as_str(), target.port)).await;
        let allow_loopback = self.options.allow_loopback_pod_ip;
        let usable = |address: &SocketAddr| {
            target::is_pod_address(address.ip().to_canonical(), allow_loopback)
        };
        let address = asked.ok().and_then(|mut addresses| addresses.find(usable));
        address
            .map(|address| (name.into_boxed_str(), address))
            .ok_or_else(|| {
                metrics::upstream_error(metrics::NO_NAMESPACE, "dns");
                unreachable(target, "no ready pod of it is known, nor a name in DNS")
            })
    }

    /// The namespace in metrics: callers may name any, and each would stay there for good.
    fn label<'t>(&self, target: &'t Target) -> &'t str {
        if self.index.knows_namespace(&target.namespace) {
            &target.namespace
        } else {
            metrics::NO_NAMESPACE
        }
    }

    fn late(&self, passage: &Passage) -> Refusal {
        let target = &passage.target;
        metrics::upstream_error(self.label(target), "timeout");
        let detail = format!("The sandbox did not answer in time: {}", target.name);
        Refusal::new(StatusCode::GATEWAY_TIMEOUT, detail)
    }

    fn broken(&self, passage: &Passage, error: &hyper::Error) -> Refusal {
        let target = &passage.target;
        if passage.too_large.load(Ordering::Relaxed) {
            return too_large(self.options.max_request_body_bytes);
        }
        metrics::upstream_error(self.label(target), "broken");
        tracing::info!(
            "sandbox {}/{} gave no answer: {error}",
            target.namespace,
            target.name
        );
        unreachable(
            target,
            "it closed the connection, or what it answered is not HTTP",
        )
    }
}

/// An answer of a sandbox's, with all that has to live as long as it.
struct Passed {
    answer: Response<Incoming>,
    upstream: Upstream,
    pool: Arc<Pool>,
    deadline: Instant,
    /// Both ends, once both have agreed to speak something else.
    tunnel: Option<(OnUpgrade, OnUpgrade)>,
    tunnel_idle: Duration,
}

// === impl Passed ===

impl Passed {
    fn status(&self) -> StatusCode {
        self.answer.status()
    }

    /// Makes the sandbox's headers those of the answer.
    fn finish(&mut self, kind: Kind, callers_end: Option<OnUpgrade>) -> Result<(), Refusal> {
        let switched = self.answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        let protocol = self.answer.headers().get(hyper::header::UPGRADE).cloned();
        if switched {
            let Some(callers_end) = callers_end else {
                let detail = "The sandbox switched to a protocol that nobody asked for.";
                return Err(Refusal::new(StatusCode::BAD_GATEWAY, detail));
            };
            self.tunnel = Some((callers_end, hyper::upgrade::on(&mut self.answer)));
        }
        headers::to_caller(&mut self.answer, kind, protocol.filter(|_| switched));
        Ok(())
    }

    fn into_answer(self, tally: Tally) -> Answer {
        let Self {
            answer,
            upstream,
            pool,
            deadline,
            tunnel,
            tunnel_idle,
        } = self;
        if let Some((callers_end, sandboxes_end)) = tunnel {
            let held = (tally, upstream);
            tokio::spawn(tunnel::join(callers_end, sandboxes_end, tunnel_idle, held));
            return answer.map(|_| super::body::empty());
        }
        let held = (tally, pool.returning(upstream));
        answer.map(|body| UnsyncBoxBody::new(Timed::new(body, deadline, held)))
    }
}

fn unreachable(target: &Target, why: &str) -> Refusal {
    // Clients know the words up to the name.
    let detail = format!(
        "Could not connect to the backend sandbox: {} ({why})",
        target.name
    );
    Refusal::new(StatusCode::BAD_GATEWAY, detail)
}

fn too_large(limit: u64) -> Refusal {
    let detail = format!("The body of a request may have {limit} bytes.");
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
}
