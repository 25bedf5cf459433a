//! Forwards the requests of one client connection to the upstream, and the responses back.

use super::head;
use super::metered_io::MeteredIo;
use crate::tcp::connection::Connection;
use crate::tcp::policy_check::{Denial, Grant, RequestedName};
use crate::tcp::rate_limit::REQUEST_COST;
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use k8e_model::egress::DenyReason;
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// The future that drives hyper's upstream connection until it closes or is upgraded.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) type ProxyResponse = Response<Either<Incoming, Full<Bytes>>>;

/// Largest head of a response, in bytes: many times that of real ones.
const HEAD_BYTES_MAX: usize = 256 * 1024;

/// The client's connection is closed without a response.
#[derive(Debug, thiserror::Error)]
#[error("the connection was aborted")]
pub(super) struct Aborted;

/// State of one client connection.
pub(super) struct HttpProxy {
    conn: Connection,
    pub(super) progress: Arc<AtomicU64>,
    /// Sends new upstream connections to the task that drives them.
    drivers: mpsc::Sender<Driver>,
    server: tokio::sync::Mutex<Option<SendRequest<Incoming>>>,
    state: Mutex<State>,
}

/// Mutable state of one client connection.
#[derive(Default)]
pub(super) struct State {
    /// The grant of the last request.
    pub(super) grant: Option<Grant>,
    /// The grant last added to the flow log. Further requests with the same are not logged again.
    noted: Option<Grant>,
    /// Why it ended without a response.
    pub(super) denial: Option<Denial>,
    /// Whether a request got a 403.
    pub(super) refused: bool,
    /// The upstream socket, to relay after an upgrade or to close cleanly.
    pub(super) upstream: Option<Arc<TcpStream>>,
    /// Both ends after an upgrade (101 Switching Protocols).
    pub(super) switched: Option<(OnUpgrade, OnUpgrade)>,
}

// === impl HttpProxy ===

impl HttpProxy {
    pub(super) fn new(conn: Connection, drivers: mpsc::Sender<Driver>) -> Self {
        Self {
            conn,
            progress: Arc::default(),
            drivers,
            server: tokio::sync::Mutex::default(),
            state: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was locked leaves a valid state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// IO for hyper on one of the two sockets.
    pub(super) fn metered(&self, stream: &Arc<TcpStream>) -> MeteredIo {
        let (stream, sandbox) = (Arc::clone(stream), Arc::clone(&self.conn.sandbox));
        MeteredIo::new(stream, sandbox, Arc::clone(&self.progress))
    }

    /// Checks one request, forwards it, and returns the response of the server.
    pub(super) async fn forward(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<ProxyResponse, Aborted> {
        self.conn.sandbox.rate_limit().take(0, REQUEST_COST).await;
        let (mut head, body) = request.into_parts();
        let (grant, switch) = match self.admit(&mut head).await {
            Ok(admitted) => admitted,
            Err(denial) => return Ok(self.refuse(&denial)),
        };
        let client_end = head.extensions.remove::<OnUpgrade>();
        let response = self.send(Request::from_parts(head, body), &grant).await?;
        self.response(response, client_end.filter(|_| switch))
    }

    /// Checks the request and rewrites its head. Returns too whether it asks for an upgrade.
    async fn admit(&self, head: &mut Parts) -> Result<(Grant, bool), Denial> {
        let malformed = |head::Malformed| Denial::by(DenyReason::Malformed);
        let requested = head::host(head).map_err(malformed)?;
        let switch = head::prepare_request(head).map_err(malformed)?;
        Ok((self.grant(&requested).await?, switch))
    }

    /// Checks the requested name, and stores the grant before it is used: a concurrent policy change
    /// finds either the old grant or the new one.
    async fn grant(&self, requested: &RequestedName) -> Result<Grant, Denial> {
        loop {
            let policy = self.conn.sandbox.policy();
            let grant = self.conn.by_requested_name(&policy, requested).await?;
            self.state().grant = Some(grant.clone());
            if Arc::ptr_eq(&policy, &self.conn.sandbox.policy()) {
                return Ok(grant);
            }
        }
    }

    async fn send(
        &self,
        request: Request<Incoming>,
        grant: &Grant,
    ) -> Result<Response<Incoming>, Aborted> {
        let mut server = self.server.lock().await;
        let mut request = request;
        // A server may close an idle connection just when the next request comes. That request was not
        // sent, so it is retried on a new connection.
        loop {
            let is_open = match server.as_mut() {
                Some(sender) => sender.ready().await.is_ok(),
                None => false,
            };
            if !is_open {
                *server = Some(self.connect(grant).await?);
            }
            let sender = server.as_mut().ok_or(Aborted)?;
            self.note(grant);
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_open => request = unsent,
                    _ => return Err(Aborted),
                },
            }
        }
    }

    async fn connect(&self, grant: &Grant) -> Result<SendRequest<Incoming>, Aborted> {
        let stream = match self.conn.connect(grant).await {
            Ok(stream) => Arc::new(stream),
            Err(denial) => {
                self.state().denial = Some(denial);
                return Err(Aborted);
            }
        };
        let io = self.metered(&stream);
        let (sender, connection) = http1::Builder::new()
            .preserve_header_case(true)
            .max_header_size(HEAD_BYTES_MAX)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|_| Aborted)?;
        let driver = Box::pin(async move {
            // An error is returned to the request that waits for a response.
            let _ = connection.with_upgrades().await;
        });
        self.drivers.send(driver).await.map_err(|_| Aborted)?;
        self.state().upstream = Some(stream);
        Ok(sender)
    }

    fn response(
        &self,
        response: Response<Incoming>,
        client_end: Option<OnUpgrade>,
    ) -> Result<ProxyResponse, Aborted> {
        let (mut head, body) = response.into_parts();
        head::prepare_response(&mut head, client_end.is_some()).map_err(|_| Aborted)?;
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            let server_end = head.extensions.remove::<OnUpgrade>();
            self.state().switched = client_end.zip(server_end);
        }
        Ok(Response::from_parts(head, Either::Left(body)))
    }

    /// A 403 with the reason and the command that would allow it, for people who read the output of
    /// their program.
    fn refuse(&self, denial: &Denial) -> ProxyResponse {
        self.conn.note_denied(denial);
        self.state().refused = true;
        let mut response = Response::new(Either::Right(Full::from(self.refusal(denial))));
        *response.status_mut() = StatusCode::FORBIDDEN;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }

    fn refusal(&self, denial: &Denial) -> String {
        let to = self.conn.to;
        let who = match &denial.name {
            Some(name) => format!("{name} ({to})"),
            None => to.to_string(),
        };
        let why = denial.reason.sentence();
        let session = &self.conn.sandbox.policy().session;
        match (&denial.name, denial.reason) {
            (Some(name), DenyReason::NotAllowed) if !session.is_empty() => format!(
                "k8e denied {who}: allow it with `k8e sandbox allow-hosts --session-id {session} --add {name}`\n"
            ),
            _ => format!("k8e denied {who}: {why}\n"),
        }
    }

    fn note(&self, grant: &Grant) {
        let mut state = self.state();
        if state.noted.as_ref() != Some(grant) {
            state.noted = Some(grant.clone());
            self.conn.note_allowed(grant);
        }
    }
}
