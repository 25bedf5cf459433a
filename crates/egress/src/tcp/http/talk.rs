//! The requests of one connection and their answers.

use super::head;
use super::shared::Shared;
use crate::tcp::check::{Denial, Pass, Said};
use crate::tcp::pace::OF_REQUEST;
use crate::tcp::visit::Visit;
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

/// What runs a connection to a server, until that closes or switches.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) type Answer = Response<Either<Incoming, Full<Bytes>>>;

/// Of a response's head. What is real fits many times over.
const HEAD_BYTES_MAX: usize = 256 * 1024;

/// The client's connection ends here, without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the connection was broken off")]
pub(super) struct BrokenOff;

/// What the requests of one connection have in common.
pub(super) struct Talk {
    visit: Visit,
    pub(super) moved: Arc<AtomicU64>,
    /// Takes connections to the server to whoever runs them.
    drivers: mpsc::Sender<Driver>,
    server: tokio::sync::Mutex<Option<SendRequest<Incoming>>>,
    state: Mutex<State>,
}

/// What became of it so far.
#[derive(Default)]
pub(super) struct State {
    /// What the last request was allowed by.
    pub(super) pass: Option<Pass>,
    /// What was written down last. The next request for the same is the same connection.
    noted: Option<Pass>,
    /// Why it ended without an answer.
    pub(super) denial: Option<Denial>,
    /// Whether a request was answered with a refusal.
    pub(super) refused: bool,
    /// The connection to the server, to go on with or to end well.
    pub(super) upstream: Option<Arc<TcpStream>>,
    /// Both ends, once both have agreed to speak something else.
    pub(super) switched: Option<(OnUpgrade, OnUpgrade)>,
}

// === impl Talk ===

impl Talk {
    pub(super) fn new(visit: Visit, drivers: mpsc::Sender<Driver>) -> Self {
        Self {
            visit,
            moved: Arc::default(),
            drivers,
            server: tokio::sync::Mutex::default(),
            state: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves a state that is still one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of its two sockets, for hyper.
    pub(super) fn shared(&self, stream: &Arc<TcpStream>) -> Shared {
        let (stream, ward) = (Arc::clone(stream), Arc::clone(&self.visit.ward));
        Shared::new(stream, ward, Arc::clone(&self.moved))
    }

    /// One request: checks it, passes it on, and gives back what the server says.
    pub(super) async fn exchange(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Answer, BrokenOff> {
        self.visit.ward.pace().take(0, OF_REQUEST).await;
        let (mut head, body) = request.into_parts();
        let (pass, switch) = match self.admit(&mut head).await {
            Ok(admitted) => admitted,
            Err(denial) => return Ok(self.refuse(&denial)),
        };
        let client_end = head.extensions.remove::<OnUpgrade>();
        let response = self.send(Request::from_parts(head, body), &pass).await?;
        self.answer(response, client_end.filter(|_| switch))
    }

    /// Makes the head that goes on, if it may. Says too whether it asks to switch protocols.
    async fn admit(&self, head: &mut Parts) -> Result<(Pass, bool), Denial> {
        let malformed = |head::Malformed| Denial::by(DenyReason::Malformed);
        let said = head::host(head).map_err(malformed)?;
        let switch = head::prepare_request(head).map_err(malformed)?;
        Ok((self.pass(&said).await?, switch))
    }

    /// Decides, and lets it be known what is decided before anybody acts on it: a policy that
    /// changes meanwhile finds either the old one here or the new one.
    async fn pass(&self, said: &Said) -> Result<Pass, Denial> {
        loop {
            let policy = self.visit.ward.policy();
            let pass = self.visit.by_said(&policy, said).await?;
            self.state().pass = Some(pass.clone());
            if Arc::ptr_eq(&policy, &self.visit.ward.policy()) {
                return Ok(pass);
            }
        }
    }

    async fn send(
        &self,
        request: Request<Incoming>,
        pass: &Pass,
    ) -> Result<Response<Incoming>, BrokenOff> {
        let mut server = self.server.lock().await;
        let mut request = request;
        // A server may close what it takes for idle just when the next request comes. That one was
        // not sent, and is sent again on a connection of its own.
        loop {
            let is_open = match server.as_mut() {
                Some(sender) => sender.ready().await.is_ok(),
                None => false,
            };
            if !is_open {
                *server = Some(self.connect(pass).await?);
            }
            let sender = server.as_mut().ok_or(BrokenOff)?;
            self.note(pass);
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_open => request = unsent,
                    _ => return Err(BrokenOff),
                },
            }
        }
    }

    async fn connect(&self, pass: &Pass) -> Result<SendRequest<Incoming>, BrokenOff> {
        let stream = match self.visit.connect(pass).await {
            Ok(stream) => Arc::new(stream),
            Err(denial) => {
                self.state().denial = Some(denial);
                return Err(BrokenOff);
            }
        };
        let io = self.shared(&stream);
        let (sender, connection) = http1::Builder::new()
            .preserve_header_case(true)
            .max_header_size(HEAD_BYTES_MAX)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|_| BrokenOff)?;
        let driver = Box::pin(async move {
            // Whoever waits for an answer is told what went wrong.
            let _ = connection.with_upgrades().await;
        });
        self.drivers.send(driver).await.map_err(|_| BrokenOff)?;
        self.state().upstream = Some(stream);
        Ok(sender)
    }

    fn answer(
        &self,
        response: Response<Incoming>,
        client_end: Option<OnUpgrade>,
    ) -> Result<Answer, BrokenOff> {
        let (mut head, body) = response.into_parts();
        head::prepare_response(&mut head, client_end.is_some()).map_err(|_| BrokenOff)?;
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
            let server_end = head.extensions.remove::<OnUpgrade>();
            self.state().switched = client_end.zip(server_end);
        }
        Ok(Response::from_parts(head, Either::Left(body)))
    }

    /// Says to the client what was denied and what to do, for people who read what their program
    /// prints.
    fn refuse(&self, denial: &Denial) -> Answer {
        self.visit.note_denied(denial);
        self.state().refused = true;
        let mut answer = Response::new(Either::Right(Full::from(self.refusal(denial))));
        *answer.status_mut() = StatusCode::FORBIDDEN;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        answer
    }

    fn refusal(&self, denial: &Denial) -> String {
        let to = self.visit.to;
        let who = match &denial.name {
            Some(name) => format!("{name} ({to})"),
            None => to.to_string(),
        };
        let why = denial.reason.sentence();
        let session = &self.visit.ward.policy().session;
        match (&denial.name, denial.reason) {
            (Some(name), DenyReason::NotAllowed) if !session.is_empty() => format!(
                "k8e denied {who}: allow it with `k8e sandbox allow-hosts --session-id {session} --add {name}`\n"
            ),
            _ => format!("k8e denied {who}: {why}\n"),
        }
    }

    fn note(&self, pass: &Pass) {
        let mut state = self.state();
        if state.noted.as_ref() != Some(pass) {
            state.noted = Some(pass.clone());
            self.visit.note_allowed(pass);
        }
    }
}
