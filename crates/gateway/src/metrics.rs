//! Metrics: the Prometheus recorder, counters of calls and authentication, and gauges of the process.
//!
//! The engine has its own names ([`k8e_engine::metrics`]). Nothing here has a label that a client
//! can choose: a call is counted under the name of a method that we know, or as `other`.

use crate::Error;
use futures::future::BoxFuture;
use hyper::body::{Body, Frame, SizeHint};
use k8e_api::{sandbox_v1, v1};
use k8e_engine::Sessions;
use k8e_net::admin_http;
use metrics::{SharedString, counter, describe_counter, describe_gauge, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::fs;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{SystemTime, UNIX_EPOCH};
use tonic::Code;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};

const GRPC_REQUESTS: &str = "k8e_grpc_requests_total";
pub(crate) const AUTH_REFUSED: &str = "k8e_auth_refused_total";
pub(crate) const AUTH_WRONG_KEYS: &str = "k8e_auth_wrong_keys_total";
pub(crate) const CONNECTIONS_CLOSED: &str = "k8e_connections_closed_total";
pub(crate) const RATE_LIMITED: &str = "k8e_rate_limited_total";
const BUILD_INFO: &str = "k8e_build_info";
// Prometheus' standard names for a process.
const PROCESS_MEMORY: &str = "process_resident_memory_bytes";
const PROCESS_FDS: &str = "process_open_fds";
const PROCESS_FDS_MAX: &str = "process_max_fds";
const PROCESS_START: &str = "process_start_time_seconds";

/// The recorder of this process. There can be one.
#[derive(Clone, Debug)]
pub struct Metrics {
    handle: PrometheusHandle,
    started: SystemTime,
}

/// Counts calls by method and code.
#[derive(Clone)]
pub(crate) struct CountLayer {
    /// By path, as in `/k8e.v1.Sandboxes/Run`.
    methods: Arc<HashMap<String, SharedString>>,
}

/// See [`CountLayer`].
#[derive(Clone)]
pub(crate) struct Count<S> {
    inner: S,
    layer: CountLayer,
}

/// The body of an answer; the call is counted when its code is known, at its end.
pub(crate) struct CountedBody<B> {
    inner: B,
    call: Call,
}

/// A call that is counted once: with its code, or as cancelled when it is dropped before.
struct Call {
    method: SharedString,
    counted: bool,
}

// === impl Metrics ===

impl Metrics {
    /// Installs the recorder. Before the engine is started, which registers its counters then.
    pub fn install() -> Result<Self, Error> {
        let mut builder = PrometheusBuilder::new();
        for (name, buckets) in k8e_engine::metrics::HISTOGRAMS {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)
                .map_err(Error::Metrics)?;
        }
        let handle = builder.install_recorder().map_err(Error::Metrics)?;
        describe();
        Ok(Self {
            handle,
            started: SystemTime::now(),
        })
    }

    /// All metrics, in Prometheus' text format.
    pub(crate) fn render(&self, sessions: &Sessions) -> String {
        sessions.observe();
        self.observe();
        self.handle.render()
    }

    /// Keeps the samples of histograms small. Never ends.
    pub(crate) async fn upkeep(&self) {
        admin_http::upkeep(self.handle.clone()).await;
    }

    fn observe(&self) {
        gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION")).set(1.0);
        let started = self.started.duration_since(UNIX_EPOCH);
        gauge!(PROCESS_START).set(started.map_or(0.0, |since| since.as_secs_f64()));
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        if let Some(bytes) = resident_bytes(&status) {
            gauge!(PROCESS_MEMORY).set(float(bytes));
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            // Reading the directory has one open too.
            gauge!(PROCESS_FDS).set(float(open.count().saturating_sub(1) as u64));
        }
        if let Some(max) = getrlimit(Resource::Nofile).current {
            gauge!(PROCESS_FDS_MAX).set(float(max));
        }
    }
}

// === impl CountLayer ===

impl CountLayer {
    /// With the methods of every service that is served.
    pub(crate) fn new() -> Self {
        let services = [
            v1::FILE_DESCRIPTOR_SET,
            sandbox_v1::FILE_DESCRIPTOR_SET,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
        ];
        let methods: HashMap<_, _> = services.into_iter().flat_map(methods).collect();
        Self {
            methods: Arc::new(methods),
        }
    }

    fn call(&self, path: &str) -> Call {
        let known = self.methods.get(path).cloned();
        Call {
            method: known.unwrap_or_else(|| SharedString::const_str("other")),
            counted: false,
        }
    }
}

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;
    fn layer(&self, inner: S) -> Count<S> {
        Count {
            inner,
            layer: self.clone(),
        }
    }
}

// === impl Count ===

impl<S, I, O> Service<Request<I>> for Count<S>
where
    S: Service<Request<I>, Response = Response<O>>,
    S::Future: Send + 'static,
{
    type Response = Response<CountedBody<O>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<I>) -> Self::Future {
        let mut call = self.layer.call(request.uri().path());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            // The code of a call that fails at once is in the headers, of others in the trailers.
            call.observe(answer.headers());
            Ok(answer.map(|inner| CountedBody { inner, call }))
        })
    }
}

// === impl CountedBody ===

impl<B: Body + Unpin> Body for CountedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.call.observe(trailers);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

// === impl Call ===

impl Call {
    /// Counts the call if these headers have its code.
    fn observe(&mut self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.count(Code::from_bytes(code.as_bytes()));
        }
    }

    fn count(&mut self, code: Code) {
        if !std::mem::replace(&mut self.counted, true) {
            let method = self.method.clone();
            counter!(GRPC_REQUESTS, "method" => method, "code" => name(code)).increment(1);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.count(Code::Cancelled);
    }
}

fn describe() {
    describe_counter!(
        GRPC_REQUESTS,
        "Calls that are over, by method and code; CANCELLED when the client left first"
    );
    describe_counter!(AUTH_REFUSED, "Calls that failed authentication");
    describe_counter!(AUTH_WRONG_KEYS, "Calls with a wrong API key");
    describe_counter!(
        CONNECTIONS_CLOSED,
        "Connections that had not authenticated and were closed to make room for others"
    );
    describe_counter!(RATE_LIMITED, "Calls refused by the rate limiter");
    describe_gauge!(BUILD_INFO, "1, with the version of k8e as label");
    describe_gauge!(PROCESS_MEMORY, "Resident memory of the server");
    describe_gauge!(PROCESS_FDS, "Open file descriptors of the server");
    describe_gauge!(PROCESS_FDS_MAX, "File descriptors that the server may open");
    describe_gauge!(PROCESS_START, "When the server started, in Unix time");
}

/// The paths of the methods in a file descriptor set, and the label of each.
fn methods(described: &[u8]) -> Vec<(String, SharedString)> {
    let files = FileDescriptorSet::decode(described)
        .map(|set| set.file)
        .unwrap_or_default();
    let mut methods = Vec::new();
    for file in &files {
        for service in &file.service {
            let names = service
                .method
                .iter()
                .map(|method| format!("{}.{}/{}", file.package(), service.name(), method.name()));
            methods.extend(names.map(|name| (format!("/{name}"), SharedString::from(name))));
        }
    }
    methods
}

/// The name of a code in gRPC's documentation.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

fn resident_bytes(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a size to 53 bits is exact enough to look at"
)]
fn float(n: u64) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_methods_that_exist_have_a_name() {
        let layer = CountLayer::new();
        let method = |path: &str| {
            let mut call = layer.call(path);
            call.counted = true;
            call.method.clone().into_owned()
        };
        assert_eq!(method("/k8e.v1.Sandboxes/Run"), "k8e.v1.Sandboxes/Run");
        assert_eq!(
            method("/grpc.health.v1.Health/Check"),
            "grpc.health.v1.Health/Check"
        );
        for invented in ["/", "", "/k8e.v1.Sandboxes/Runn", "/k8e.v1.Sandboxes/Run/"] {
            assert_eq!(method(invented), "other", "{invented:?}");
        }
    }

    #[test]
    fn the_kernels_words_are_read() {
        assert_eq!(
            resident_bytes("VmHWM: 9 kB\nVmRSS:\t  12 kB\n"),
            Some(12288)
        );
        assert_eq!(resident_bytes("VmRSS: many"), None);
    }
}
