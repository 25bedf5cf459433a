//! Requests to services in a sandbox: a reverse proxy, with WebSockets.
//!
//! As with E2B, a port of a running sandbox is reached by whoever knows the sandbox's id, which cannot be guessed; what
//! listens there authenticates its own clients.

use super::body::Answer;
use super::error::{Failure, is_gone};
use super::{Api, Client};
use crate::expose::{Failed, forward};
use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::StatusCode;
use hyper::body::Incoming;
use k8e_model::{Code, Port, Principal, SessionId};
use std::time::Duration;
use tokio::time::sleep;

/// A service that is just starting is waited for: five attempts, and the pause between them.
const ATTEMPTS: u32 = 5;
const BETWEEN: Duration = Duration::from_millis(200);

/// Headers that are for this server; the service must not get the token of its own sandbox.
const OWN_HEADERS: [&str; 5] = [
    "e2b-sandbox-id",
    "e2b-sandbox-port",
    "e2b-traffic-access-token",
    "x-access-token",
    "x-api-key",
];

/// Passes a request on to a port.
pub(super) async fn serve(
    api: &Api,
    id: &SessionId,
    port: u16,
    mut request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let owner = api.sessions.owner_of(id).ok_or_else(|| Failure::gone(id))?;
    let who = Principal::token_holder(&owner);
    let admitted = api
        .authenticator
        .admit_known(&who, crate::rate_limit::Class::Read);
    admitted.map_err(|status| Failure::new(StatusCode::TOO_MANY_REQUESTS, status.message()))?;
    if client.slot.authenticate().is_err() {
        let message = "too many connections: use fewer at once";
        return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, message));
    }
    let number = Port::new(port.into())?;
    let open = api.sessions.own_port(&who, id, number).await;
    let open = open.map_err(|error| Failure::in_sandbox(id, &error))?;
    let mut attempt = 0;
    let connection = loop {
        attempt += 1;
        match open.connect().await {
            Ok(connection) => break connection,
            Err(error) if is_gone(&error) => return Err(Failure::gone(id)),
            Err(error) if error.code() == Code::Exhausted => return Err(Failure::of(&error)),
            Err(_) if attempt < ATTEMPTS => sleep(BETWEEN).await,
            Err(_) => return Err(Failure::port_closed(id, port)),
        }
    };
    // For this server, not for what runs in the sandbox.
    for name in OWN_HEADERS {
        request.headers_mut().remove(name);
    }
    match forward(connection, request).await {
        Ok(answer) => Ok(answer.map(|body| body.map_err(Into::into).boxed_unsync())),
        Err(Failed::Gone) => Err(Failure::gone(id)),
        Err(Failed::Unreachable(status, why)) => Err(Failure::new(status, why)),
    }
}
