//! Requests to a sandbox: authentication by its access token, and which of `envd`'s calls or which port it is.

use super::body::{self, Answer};
use super::connect::{self, Rpc};
use super::error::Failure;
use super::target::{ENVD, INTERPRETER, Target};
use super::{Api, Client, files, filesystem, interpreter, ports, process};
use crate::rate_limit::Class;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use k8e_model::{ClientKind, Phase, Principal, SessionId};
use serde_json::{Map, Value};

pub(super) const ACCESS_TOKEN: &str = "x-access-token";

/// Calls of the host to `envd`, which nobody else may make.
const HOST_ONLY: [&str; 7] = [
    "/init",
    "/freeze",
    "/unfreeze",
    "/collapse",
    "/fsfreeze",
    "/fsthaw",
    "/upgrade",
];

/// A sandbox that runs, and who acts for its owner.
pub(super) struct Authenticated<'a> {
    pub(super) api: &'a Api,
    pub(super) id: SessionId,
    pub(super) who: Principal,
}

/// Serves a request to a port of a sandbox.
pub(super) async fn serve(
    api: &Api,
    target: Target,
    request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let Target { id, port } = target;
    // Before authentication: clients ask whether a sandbox runs without a token. Ids cannot be guessed.
    match api.sessions.live_phase(&id, &ClientKind::e2b()) {
        Some(Phase::Active) => {}
        Some(Phase::Creating | Phase::Paused | Phase::Terminating | Phase::Ended) | None => {
            return Err(Failure::gone(&id));
        }
    }
    if port == INTERPRETER {
        return interpreter::serve(api, id, request, client).await;
    }
    if port != ENVD {
        return ports::serve(api, &id, port, request, client).await;
    }
    let path = request.uri().path().replace("//", "/");
    if path == "/health" && request.method() == Method::GET {
        return Ok(body::empty(StatusCode::NO_CONTENT));
    }
    if HOST_ONLY.contains(&path.as_str()) {
        return Err(Failure::not_found(format!("no such call: {path}")));
    }
    let token = request.headers().get(ACCESS_TOKEN);
    let Some(token) = token.map(|token| token.to_str().unwrap_or_default()) else {
        if path == "/files" {
            return files::serve_signed_for(api, &id, request, client).await;
        }
        return Err(Failure::unauthenticated(
            "missing access token (X-Access-Token)",
        ));
    };
    let who = api
        .sessions
        .verify_access_token(&id, &ClientKind::e2b(), token);
    let who = who.ok_or_else(|| Failure::unauthenticated("invalid access token"))?;
    let call = Authenticated::admitted(api, id, who, request.method(), &path, client)?;
    match (request.method().as_str(), path.as_str()) {
        (_, "/files") => files::serve(&call, request).await,
        ("GET", "/envs") => call.envs().await,
        ("GET", "/metrics") => call.metrics().await,
        ("POST", path) => {
            let (service, method) = path
                .trim_start_matches('/')
                .split_once('/')
                .unwrap_or((path, ""));
            let rpc = Rpc::new(request.headers())?;
            match service {
                "process.Process" => process::serve(&call, rpc, method, request).await,
                "filesystem.Filesystem" => filesystem::serve(&call, rpc, method, request).await,
                _ => Err(Failure::not_found(format!("no such call: {path}"))),
            }
        }
        _ => Err(Failure::not_found(format!("no such call: {path}"))),
    }
}

// === impl Authenticated ===

impl<'a> Authenticated<'a> {
    /// Counts an authenticated request against its owner's rate limit, and its connection as authenticated.
    pub(super) fn admitted(
        api: &'a Api,
        id: SessionId,
        who: Principal,
        method: &Method,
        path: &str,
        client: &Client,
    ) -> Result<Self, Failure> {
        let reads = *method == Method::GET
            || [
                "/Stat",
                "/ListDir",
                "/List",
                "/Connect",
                "/GetWatcherEvents",
                "/WatchDir",
            ]
            .iter()
            .any(|name| path.ends_with(name));
        let class = if reads { Class::Read } else { Class::Write };
        let admitted = api.authenticator.admit_known(&who, class);
        admitted.map_err(|status| Failure::new(StatusCode::TOO_MANY_REQUESTS, status.message()))?;
        if client.slot.authenticate().is_err() {
            let message = "too many connections: use fewer at once";
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        let who = who.calling_from(client.address.to_canonical().to_string());
        Ok(Self { api, id, who })
    }

    /// The environment variables that the sandbox was created with.
    async fn envs(&self) -> Result<Answer, Failure> {
        let view = self.api.sessions.get(&self.who, &self.id).await;
        let view = view.map_err(|error| self.failed(&error))?;
        let env = view.session.env.iter();
        let env: Map<String, Value> = env
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        body::json(StatusCode::OK, &env)
    }

    async fn metrics(&self) -> Result<Answer, Failure> {
        let metrics = self.api.sessions.session_metrics(&self.who, &self.id).await;
        let metrics = metrics.map_err(|error| self.failed(&error))?;
        body::json(StatusCode::OK, &super::metrics::envd(&metrics))
    }

    pub(super) fn failed(&self, error: &k8e_engine::Error) -> Failure {
        Failure::in_sandbox(&self.id, error)
    }

    /// An error of an RPC.
    pub(super) fn refused(&self, error: &k8e_engine::Error) -> connect::Error {
        connect::Error::of(error)
    }
}
