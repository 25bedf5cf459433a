//! The reverse proxy: for one request, finds the target, authorizes, resolves the endpoint, connects with retries, and
//! streams request and response.

mod headers;
mod pool;
mod tunnel;

use super::authz::Authorizer;
use super::body::{AnyBody, BoxResponse, DeadlineBody, LimitedBody};
use super::index::{Found, Index, Missing};
use super::metrics::{self, RequestMetrics};
use super::options::Options;
use super::refusal::Refusal;
use super::serve::ActiveRequest;
use super::target::{self, Rules, Target};
use ::metrics::SharedString;
use headers::Kind;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri};
use pool::{ConnectError, Connected, Pool, Upstream};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// The request handler of all listeners.
pub(super) struct Proxy {
    options: Options,
    index: Arc<Index>,
    authorizer: Authorizer,
    pool: Arc<Pool>,
}

/// The client of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub(super) address: IpAddr,
    pub(super) tls: bool,
}

/// An authorized request: its target, protocol and deadline.
struct Admitted {
    target: Target,
    kind: Kind,
    deadline: Instant,
    /// Set when the request body exceeds --max-request-body-bytes.
    too_large: Arc<AtomicBool>,
}

/// Guards that are dropped with the end of a request.
struct RequestGuard {
    metrics: RequestMetrics,
    _active: ActiveRequest,
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

    /// Handles one request.
    pub(super) async fn handle(
        &self,
        request: Request<Incoming>,
        caller: Caller,
        active: ActiveRequest,
    ) -> BoxResponse {
        let mut guard = RequestGuard {
            metrics: RequestMetrics::new(request.method()),
            _active: active,
        };
        let grpc = headers::is_grpc(&request);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let request_id = headers::request_id(&request);
        let begun = Instant::now();
        // Boxed: the future is large, and is part of the connection's task.
        let passed = Box::pin(self.forward(request, caller, &mut guard)).await;
        let (status, answer) = match passed {
            Ok(passed) => (passed.status(), Ok(passed)),
            Err(refusal) => (refusal.status(), Err(refusal)),
        };
        guard.metrics.code = status.as_u16();
        if self.options.access_log {
            tracing::info!(
                %method, path, request_id, status = status.as_u16(), caller = %caller.address,
                millis = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                "request"
            );
        }
        match answer {
            Ok(passed) => passed.into_answer(guard),
            Err(refusal) => refusal.answer(grpc),
        }
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        caller: Caller,
        guard: &mut RequestGuard,
    ) -> Result<Proxied, Refusal> {
        let (admitted, uri) = self.admit(&request, guard).await?;
        let callers_end =
            (admitted.kind == Kind::Upgrade).then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        if let Some(uri) = uri {
            parts.uri = uri;
        }
        headers::to_sandbox(&mut parts, admitted.kind, caller);
        let body = self.checked_body(&parts.headers, body, &admitted)?;
        let request = Request::from_parts(parts, body);
        let (answer, upstream) = self.send(&admitted, request).await?;
        let mut passed = Proxied {
            answer,
            upstream,
            pool: Arc::clone(&self.pool),
            deadline: admitted.deadline,
            tunnel: None,
            tunnel_idle: self.options.websocket_idle_timeout,
        };
        passed.finish(admitted.kind, callers_end)?;
        Ok(passed)
    }

    /// Parses the target of a request and authorizes it.
    async fn admit(
        &self,
        request: &Request<Incoming>,
        guard: &mut RequestGuard,
    ) -> Result<(Admitted, Option<Uri>), Refusal> {
        if request.method() == Method::CONNECT {
            let detail = "CONNECT is not supported: the router is a proxy for sandboxes only.";
            return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, detail));
        }
        let kind = headers::kind(request);
        let (target, uri) = self.target(request, kind)?;
        let label = SharedString::from(self.label(&target).to_owned());
        guard.metrics.namespace = label.clone();
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
        let admitted = Admitted {
            target,
            kind,
            deadline: Instant::now() + within,
            too_large: Arc::default(),
        };
        Ok((admitted, uri))
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
        admitted: &Admitted,
    ) -> Result<AnyBody, Refusal> {
        let limit = self.options.max_request_body_bytes;
        let told = body
            .size_hint()
            .exact()
            .or_else(|| headers::content_length(headers));
        if limit == 0 {
            return Ok(UnsyncBoxBody::new(DeadlineBody::new(
                body,
                admitted.deadline,
                (),
            )));
        }
        if told.is_some_and(|told| told > limit) {
            return Err(too_large(limit));
        }
        let body = LimitedBody::new(body, limit, Arc::clone(&admitted.too_large));
        Ok(UnsyncBoxBody::new(DeadlineBody::new(
            body,
            admitted.deadline,
            (),
        )))
    }

    /// Sends the request and waits for the head of the response.
    async fn send(
        &self,
        admitted: &Admitted,
        request: Request<AnyBody>,
    ) -> Result<(Response<Incoming>, Upstream), Refusal> {
        let mut request = request;
        let mut stale = 0;
        loop {
            let dialled = timeout_at(admitted.deadline, self.dial(admitted)).await;
            let Connected {
                mut upstream,
                reused,
            } = dialled.map_err(|_| self.timed_out(admitted))??;
            headers::address(&mut request, upstream.address(), admitted.kind)?;
            let answer_by = Instant::now() + self.options.answer_within();
            let sent = timeout_at(admitted.deadline.min(answer_by), upstream.send(request)).await;
            match sent {
                Ok(Ok(answer)) => return Ok((answer, upstream)),
                // The sandbox closed an idle connection before any byte of the request was sent: safe to retry.
                Ok(Err((_, Some(unsent)))) if reused && stale < pool::IDLE_PER_POD_MAX => {
                    request = unsent;
                    stale += 1;
                }
                Ok(Err((error, _))) => return Err(self.upstream_failed(admitted, &error)),
                Err(_) => return Err(self.timed_out(admitted)),
            }
        }
    }

    /// Connects to the sandbox. Only failed connection attempts are retried, with exponential back-off.
    async fn dial(&self, admitted: &Admitted) -> Result<Connected, Refusal> {
        let target = &admitted.target;
        let mut pause = self.options.upstream_retry_initial_delay;
        let mut attempts = 0;
        loop {
            let (pod, address) = self.locate(target).await?;
            let within = self.options.upstream_connect_timeout;
            let error = match self
                .pool
                .connect(&pod, address, admitted.kind, within)
                .await
            {
                Ok(dialled) => return Ok(dialled),
                Err(ConnectError::Full) => return Err(self.pool_exhausted(target)),
                Err(ConnectError::Dial(error)) => error,
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

    fn pool_exhausted(&self, target: &Target) -> Refusal {
        metrics::upstream_error(self.label(target), "full");
        let detail = format!(
            "The router has reached its limit of {} connections to sandboxes (--max-connections): try again later.",
            self.options.max_connections
        );
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }

    /// Resolves the target to a pod (its UID) and its address.
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
        // DNS has no UIDs: a request for a certain UID must not reach another sandbox of the same name.
        let by_name = target.pod_ip.is_none() && target.uid.is_none();
        if missing == Missing::Pod && self.options.dns_fallback && by_name {
            return self.ask_dns(target).await;
        }
        metrics::upstream_error(self.label(target), "no_pod");
        // Always 502: clients drop a cached address on this status.
        Err(unreachable(
            target,
            match missing {
                Missing::Pod => "it has no ready pod",
                Missing::OtherUid => {
                    "the sandbox with this name has another UID than X-Sandbox-UID"
                }
            },
        ))
    }

    /// Resolves the DNS name of the sandbox's Service. Only with --dns-fallback.
    async fn ask_dns(&self, target: &Target) -> Result<(Box<str>, SocketAddr), Refusal> {
        let domain = self.options.cluster_domain.trim_end_matches('.');
        // The trailing dot makes the name absolute: no search domains.
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
                unreachable(
                    target,
                    "it has no ready pod, and its Service no address in DNS",
                )
            })
    }

    /// The namespace as a metric label, if it has a sandbox: clients must not be able to create label values.
    fn label<'t>(&self, target: &'t Target) -> &'t str {
        if self.index.knows_namespace(&target.namespace) {
            &target.namespace
        } else {
            metrics::NO_NAMESPACE
        }
    }

    fn timed_out(&self, admitted: &Admitted) -> Refusal {
        let target = &admitted.target;
        metrics::upstream_error(self.label(target), "timeout");
        let detail = format!("The sandbox did not answer in time: {}", target.name);
        Refusal::new(StatusCode::GATEWAY_TIMEOUT, detail)
    }

    fn upstream_failed(&self, admitted: &Admitted, error: &hyper::Error) -> Refusal {
        let target = &admitted.target;
        if admitted.too_large.load(Ordering::Relaxed) {
            return too_large(self.options.max_request_body_bytes);
        }
        metrics::upstream_error(self.label(target), "broken");
        tracing::info!(
            "no response from sandbox {}/{}: {error}",
            target.namespace,
            target.name
        );
        unreachable(
            target,
            "it closed the connection, or its response is not HTTP",
        )
    }
}

/// The response of a sandbox, with the connection and the timeouts of its body.
struct Proxied {
    answer: Response<Incoming>,
    upstream: Upstream,
    pool: Arc<Pool>,
    deadline: Instant,
    /// Both ends of an upgraded connection.
    tunnel: Option<(OnUpgrade, OnUpgrade)>,
    tunnel_idle: Duration,
}

// === impl Proxied ===

impl Proxied {
    fn status(&self) -> StatusCode {
        self.answer.status()
    }

    /// Rewrites the headers of the response for the client.
    fn finish(&mut self, kind: Kind, callers_end: Option<OnUpgrade>) -> Result<(), Refusal> {
        let switched = self.answer.status() == StatusCode::SWITCHING_PROTOCOLS;
        let protocol = self.answer.headers().get(hyper::header::UPGRADE).cloned();
        if switched {
            let Some(callers_end) = callers_end else {
                let detail = "The sandbox switched protocols without a request for an upgrade.";
                return Err(Refusal::new(StatusCode::BAD_GATEWAY, detail));
            };
            self.tunnel = Some((callers_end, hyper::upgrade::on(&mut self.answer)));
        }
        headers::to_caller(&mut self.answer, kind, protocol.filter(|_| switched));
        Ok(())
    }

    fn into_answer(self, guard: RequestGuard) -> BoxResponse {
        let Self {
            answer,
            upstream,
            pool,
            deadline,
            tunnel,
            tunnel_idle,
        } = self;
        if let Some((callers_end, sandboxes_end)) = tunnel {
            let until_end = (guard, upstream);
            tokio::spawn(tunnel::join(
                callers_end,
                sandboxes_end,
                tunnel_idle,
                until_end,
            ));
            return answer.map(|_| super::body::empty());
        }
        let until_end = (guard, pool.return_on_drop(upstream));
        answer.map(|body| UnsyncBoxBody::new(DeadlineBody::new(body, deadline, until_end)))
    }
}

fn unreachable(target: &Target, why: &str) -> Refusal {
    // Clients match the text up to the name.
    let detail = format!(
        "Could not connect to the backend sandbox: {} ({why})",
        target.name
    );
    Refusal::new(StatusCode::BAD_GATEWAY, detail)
}

fn too_large(limit: u64) -> Refusal {
    let detail = format!("The request body exceeds the limit of {limit} bytes.");
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
}
