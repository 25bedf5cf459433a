//! Connections: for whom each is meant, whether that is allowed, and the real one.
//!
//! The kernel hands every connection that a sandbox opens to the gate, whatever address it was for.
//! The sandbox believes it is connected before anything is decided; what is denied is reset.

mod carrier;
mod check;
mod cursor;
pub(crate) mod fuzzing;
mod hello;
mod http;
mod opening;
mod pace;
mod relay;
mod socket;
mod tls;
mod visit;

use pace::Rate;

pub(crate) use pace::Pace;

use crate::ward::Ward;
use check::{Denial, Ground};
use k8e_model::egress::DenyReason;
use opening::Opening;
use relay::End;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use visit::{Visit, World};

/// When there is nothing to accept with (descriptors, memory): somebody will close something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// New connections a second, in the long run. What a sandbox opens is the server's work, not
/// counted against the sandbox's CPU; more wait in the kernel, which costs nobody else.
const CONNECTIONS_PER_SECOND: u64 = 1000;

/// Serves a sandbox's connections until it is dropped, and all of them with it.
pub(crate) async fn serve(ward: Arc<Ward>, listener: TcpListener) {
    serve_in(World::Real, ward, listener).await;
}

async fn serve_in(world: World, ward: Arc<Ward>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    let mut failed = false;
    let pace = Rate::new(CONNECTIONS_PER_SECOND);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    failed = false;
                    accept(world, &ward, client, &mut connections);
                    pace.take(1).await;
                }
                Err(error) => {
                    if !std::mem::replace(&mut failed, true) {
                        tracing::warn!(%error, "cannot accept a sandbox's connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(ended) = connections.join_next() => if let Err(error) = ended {
                tracing::error!(%error, "a sandbox's connection ended badly");
            },
        }
    }
}

fn accept(world: World, ward: &Arc<Ward>, client: TcpStream, connections: &mut JoinSet<()>) {
    socket::prepare(&client);
    let Some(to) = world.destination(&client) else {
        return;
    };
    let visit = Visit {
        ward: Arc::clone(ward),
        to,
        world,
    };
    let Some(permit) = ward.connection() else {
        visit.note_denied(&Denial::by(DenyReason::TooManyConnections));
        return;
    };
    connections.spawn(async move {
        handle(visit, client).await;
        drop(permit);
    });
}

/// One connection, to its end.
async fn handle(visit: Visit, client: TcpStream) {
    let client = Arc::new(client);
    match decide_and_carry(&visit, &client).await {
        Ok(End::Finished | End::Broken | End::Idle) => {}
        Err(denial) => visit.note_denied(&denial),
    }
}

async fn decide_and_carry(visit: &Visit, client: &Arc<TcpStream>) -> Result<End, Denial> {
    let mut changes = visit.ward.policy_changes();
    let policy = Arc::clone(&changes.borrow_and_update());
    let ground = visit.ground(&policy)?;
    let wants_name = ground == Ground::ByName || check::denies_names(&policy.deny);
    match visit.to.port() {
        443 if wants_name => tls::handle(visit, client, &mut changes).await,
        80 if wants_name => http::handle(visit, client, &mut changes).await,
        _ => {
            let pass = visit.by_told(&policy).await?;
            visit
                .carry(client, &mut changes, &pass, Opening::default())
                .await
        }
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
