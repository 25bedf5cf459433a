//! End-to-end tests of the router: real client connections, and real servers on loopback as sandboxes.

mod access;
mod forwarding;
mod listeners;
mod pods;
mod refusals;
mod streams;

use super::authz::Authorizer;
use super::body::{AnyBody, BoxError, empty, full};
use super::index::Index;
use super::options::Options;
use super::proxy::Proxy;
use super::serve::ProxyListener;
use clap::Parser;
use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use k8e_net::accept::ConnectionLimit;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Timeout of every step: a step that takes longer is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

/// A router on loopback, by default without authorization.
struct Router {
    index: Arc<Index>,
    address: SocketAddr,
    _stop: watch::Sender<bool>,
}

/// A server that stands for a sandbox.
struct Sandbox {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

/// A complete response.
struct Heard {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

fn options(flags: &[&str]) -> Options {
    let always = [
        "router",
        "--allow-loopback-pod-ip",
        "--resolve-timeout=20ms",
    ];
    Cli::parse_from(always.iter().chain(flags)).options
}

// === impl Router ===

impl Router {
    async fn start(flags: &[&str]) -> Self {
        Self::start_with(options(flags), Authorizer::AllowAll).await
    }

    async fn start_with(options: Options, authorizer: Authorizer) -> Self {
        let index = Arc::new(Index::new(true));
        let proxy = Proxy::new(options, Arc::clone(&index), authorizer);
        Self::start_listener(index, proxy, None).await
    }

    async fn start_listener(
        index: Arc<Index>,
        proxy: Proxy,
        tls: Option<tokio_rustls::TlsAcceptor>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopping) = watch::channel(false);
        let room = ConnectionLimit::new(proxy.options().max_connections as usize);
        tokio::spawn(ProxyListener::new(listener, tls).serve(Arc::new(proxy), room, stopping));
        index.apply(Event::Init);
        index.apply(Event::InitDone);
        Self {
            index,
            address,
            _stop: stop,
        }
    }

    /// Adds the server to the index as a sandbox of this name in namespace `team`.
    fn knows(&self, name: &str, sandbox: &Sandbox) {
        let ip = sandbox.address.ip().to_string();
        self.index.apply(Event::Apply(pod(name, &ip)));
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends a request with HTTP/1.1 on a new connection.
    async fn ask(&self, request: Request<AnyBody>) -> Heard {
        let asked = async {
            let stream = TokioIo::new(self.connect().await);
            let (mut sender, connection) = http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            hear(sender.send_request(request).await.unwrap())
                .await
                .unwrap()
        };
        tokio::time::timeout(STUCK_AFTER, asked).await.unwrap()
    }

    /// The same with HTTP/2 (prior knowledge).
    async fn ask_http2(&self, request: Request<AnyBody>) -> Heard {
        let asked = async {
            let stream = TokioIo::new(self.connect().await);
            let executor = TokioExecutor::new();
            let (mut sender, connection) = http2::handshake(executor, stream).await.unwrap();
            tokio::spawn(connection);
            hear(sender.send_request(request).await.unwrap())
                .await
                .unwrap()
        };
        tokio::time::timeout(STUCK_AFTER, asked).await.unwrap()
    }
}

// === impl Sandbox ===

impl Sandbox {
    /// Serves HTTP/1.1 and HTTP/2.
    async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<AnyBody>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::serve(listener, answer)
    }

    fn serve<F, A>(listener: TcpListener, answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<AnyBody>> + Send + 'static,
    {
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                let answer = answer.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| {
                        let answer = answer.clone();
                        async move { Ok::<_, std::convert::Infallible>(answer(request).await) }
                    });
                    let builder = auto::Builder::new(TokioExecutor::new());
                    let _ = builder
                        .serve_connection_with_upgrades(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            address,
            connections,
        }
    }

    /// A sandbox that echoes the request as JSON.
    async fn mirror() -> Self {
        Self::start(|request| async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let headers: Vec<_> = parts
                .headers
                .iter()
                .map(|(name, value)| {
                    json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())])
                })
                .collect();
            let told = json!({
                "method": parts.method.as_str(),
                "uri": parts.uri.to_string(),
                "version": format!("{:?}", parts.version),
                "headers": headers,
                "body": String::from_utf8_lossy(&body),
            });
            Response::new(full(told.to_string()))
        })
        .await
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn port(&self) -> String {
        self.address.port().to_string()
    }

    /// A request for this sandbox, under the name `sb`.
    fn request(&self) -> hyper::http::request::Builder {
        Request::builder()
            .uri("/path?q=1")
            .header("x-sandbox-id", "sb")
            .header("x-sandbox-namespace", "team")
            .header("x-sandbox-port", self.port())
    }

    /// The same for HTTP/2, with an absolute URI.
    fn request_http2(&self) -> hyper::http::request::Builder {
        self.request().uri("http://router.example/path?q=1")
    }
}

// === impl Heard ===

impl Heard {
    fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn detail(&self) -> String {
        self.json()["detail"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    /// Values of a header in the request that a mirror received.
    fn mirrored(&self, name: &str) -> Vec<String> {
        let told = self.json();
        let headers = told["headers"].as_array().unwrap().iter();
        let named = headers.filter(|pair| pair[0] == name);
        named
            .map(|pair| pair[1].as_str().unwrap().to_owned())
            .collect()
    }
}

async fn hear(answer: Response<Incoming>) -> Result<Heard, hyper::Error> {
    let (parts, body) = answer.into_parts();
    let collected = body.collect().await?;
    Ok(Heard {
        status: parts.status,
        headers: parts.headers,
        trailers: collected.trailers().cloned(),
        body: collected.to_bytes(),
    })
}

/// A ready pod of the sandbox of the same name, in namespace `team`.
fn pod(name: &str, ip: &str) -> Pod {
    pod_with(name, ip, json!({}))
}

/// The same with a JSON merge patch applied.
fn pod_with(name: &str, ip: &str, changes: Value) -> Pod {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "team", "uid": format!("pod-{name}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {crate::crd::names::NAME_HASH: crate::crd::names::hash(name)},
            "ownerReferences": [{
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": name,
                "uid": format!("uid-{name}"), "controller": true,
            }],
        },
        "spec": {"containers": []},
        "status": {
            "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    merge(&mut pod, changes);
    serde_json::from_value(pod).unwrap()
}

fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, change) in changes {
                merge(into.entry(key).or_insert(Value::Null), change);
            }
        }
        (into, changes) => *into = changes,
    }
}

fn no_body() -> AnyBody {
    empty()
}

fn body(text: &str) -> AnyBody {
    full(text.to_owned())
}
