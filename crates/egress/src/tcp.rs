//! Transparent TCP proxy: accepts every connection that a sandbox opens, checks its destination
//! against the policy, and relays it to the real upstream.
//!
//! TPROXY delivers the connection whatever its destination. It is accepted before it is checked; when
//! it is denied it is reset.

mod client_hello;
mod connection;
mod cursor;
pub(crate) mod fuzzing;
mod hello_retry;
mod http;
mod policy_check;
mod rate_limit;
mod relay;
mod relay_buffer;
mod socket;
mod tls;

use rate_limit::Pacer;

pub(crate) use rate_limit::RateLimit;

use crate::sandbox_net::SandboxNet;
use connection::{Connection, Dialer};
use hello_retry::Prefix;
use k8e_model::egress::DenyReason;
use policy_check::{AddressVerdict, Denial};
use relay::End;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Sustained new connections per second and sandbox. Accepting them is CPU time of the server, not of
/// the sandbox's cgroup; more wait in the listen backlog.
const CONNECTIONS_PER_SECOND: u64 = 1000;

/// Serves a sandbox's connections until the task is dropped, which closes all of them.
pub(crate) async fn serve(sandbox: Arc<SandboxNet>, listener: TcpListener) {
    serve_in(Dialer::Real, sandbox, listener).await;
}

async fn serve_in(dialer: Dialer, sandbox: Arc<SandboxNet>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    let rate_limit = Pacer::new(CONNECTIONS_PER_SECOND);
    loop {
        tokio::select! {
            client = k8e_net::accept::accept(&listener) => {
                accept(dialer, &sandbox, client, &mut connections);
                rate_limit.take(1).await;
            }
            Some(ended) = connections.join_next() => if let Err(error) = ended {
                tracing::error!(%error, "task of a sandbox's connection panicked");
            },
        }
    }
}

fn accept(
    dialer: Dialer,
    sandbox: &Arc<SandboxNet>,
    client: TcpStream,
    connections: &mut JoinSet<()>,
) {
    socket::prepare(&client);
    let Some(to) = dialer.destination(&client) else {
        return;
    };
    let conn = Connection {
        sandbox: Arc::clone(sandbox),
        to,
        dialer,
    };
    let Some(permit) = sandbox.connection() else {
        conn.note_denied(&Denial::by(DenyReason::TooManyConnections));
        return;
    };
    connections.spawn(async move {
        handle(conn, client).await;
        drop(permit);
    });
}

/// Proxies one connection to its end.
async fn handle(conn: Connection, client: TcpStream) {
    let client = Arc::new(client);
    match check_and_relay(&conn, &client).await {
        Ok(End::Finished | End::Broken | End::Idle) => {}
        Err(denial) => conn.note_denied(&denial),
    }
}

async fn check_and_relay(conn: &Connection, client: &Arc<TcpStream>) -> Result<End, Denial> {
    let mut changes = conn.sandbox.policy_changes();
    let policy = Arc::clone(&changes.borrow_and_update());
    let address_verdict = conn.address_verdict(&policy)?;
    let wants_name =
        address_verdict == AddressVerdict::NeedsName || policy_check::denies_names(&policy.deny);
    match conn.to.port() {
        443 if wants_name => tls::handle(conn, client, &mut changes).await,
        80 if wants_name => http::handle(conn, client, &mut changes).await,
        _ => {
            let grant = conn.by_sent_replies(&policy).await?;
            conn.relay(client, &mut changes, &grant, Prefix::default())
                .await
        }
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
