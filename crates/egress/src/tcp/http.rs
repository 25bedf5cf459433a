//! Port 80: the name is the `Host` of every request.
//!
//! A connection can carry many requests, each for another name. So requests are read and written
//! anew: where one ends and the next begins is what hyper reads, not what some server might make of
//! the same bytes, and nothing can hide between two of them.

pub(super) mod fuzzing;
mod head;
mod shared;
mod talk;

use super::check::Denial;
use super::relay::{self, End, Side};
use super::socket;
use super::visit::Visit;
use crate::ward::Policy;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8e_model::egress::DenyReason;
use shared::Shared;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use talk::{Driver, Talk};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// Of a request's head. Servers take 8 to 64 KiB.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// For the next request to begin and its head to end. As long as servers keep a connection that
/// nobody uses.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// How long, and for how many bytes, a client that was refused is listened to: who is still sending
/// when we close would be reset, and never see why.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1024 * 1024;

/// A client that has said all and gets no answer is taken for gone after this long, at most twice
/// this long: closing and half-closing look the same, and most that close have given up.
const ABANDONED_AFTER: Duration = Duration::from_secs(30);

/// Checks and carries each request, until either side has enough.
pub(super) async fn handle(
    visit: &Visit,
    client: &Arc<TcpStream>,
    changes: &mut watch::Receiver<Arc<Policy>>,
) -> Result<End, Denial> {
    let (drivers, new_drivers) = mpsc::channel(1);
    let talk = Arc::new(Talk::new(visit.clone(), drivers));
    let pass = || talk.state().pass.clone();
    tokio::select! {
        biased;
        denial = visit.revoked(changes, pass) => Err(denial),
        end = carry(visit, client, &talk, new_drivers) => end,
        () = relay::stands_still(&talk.moved, relay::IDLE_MAX) => Ok(End::Idle),
        () = socket::broken(client) => Ok(End::Broken),
        () = abandoned(client, &talk.moved) => Ok(End::Broken),
    }
}

async fn abandoned(client: &TcpStream, moved: &AtomicU64) {
    loop {
        relay::stands_still(moved, ABANDONED_AFTER).await;
        if socket::has_ended(client) {
            return;
        }
    }
}

async fn carry(
    visit: &Visit,
    client: &Arc<TcpStream>,
    talk: &Arc<Talk>,
    mut drivers: mpsc::Receiver<Driver>,
) -> Result<End, Denial> {
    let io = talk.shared(client);
    let service = service_fn(|request| Arc::clone(talk).exchange(request));
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_header_size(HEAD_BYTES_MAX)
            .half_close(true)
            .preserve_header_case(true)
            .auto_date_header(false)
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades()
    );
    let mut driver = None;
    let served = loop {
        tokio::select! {
            biased;
            served = &mut connection => break served,
            Some(new) = drivers.recv() => driver = Some(new),
            () = drive(&mut driver) => {
                // The server has closed, so the client's next request had better be on another
                // connection.
                driver = None;
                connection.as_mut().graceful_shutdown();
            }
        }
    };
    let (denial, switched, refused, passed) = {
        let mut state = talk.state();
        let switched = state.switched.take();
        (
            state.denial.take(),
            switched,
            state.refused,
            state.pass.is_some(),
        )
    };
    if let Some(denial) = denial {
        return Err(denial);
    }
    match served {
        Err(error) if error.is_parse() => Err(Denial::by(DenyReason::Malformed)),
        _ if !passed && !refused => Err(Denial::by(DenyReason::NoName)),
        Err(_) => Ok(End::Broken),
        Ok(()) => match switched {
            Some(ends) => Ok(switch(visit, client, talk, driver, ends).await),
            None => {
                if refused {
                    linger(client).await;
                }
                finish(client, talk);
                Ok(End::Finished)
            }
        },
    }
}

/// Both sides have agreed to speak something else, and are left to it.
async fn switch(
    visit: &Visit,
    client: &TcpStream,
    talk: &Talk,
    mut driver: Option<Driver>,
    (client_end, server_end): (OnUpgrade, OnUpgrade),
) -> End {
    let mut ends = pin!(async { tokio::try_join!(client_end, server_end) });
    let ends = loop {
        tokio::select! {
            ends = &mut ends => break ends,
            () = drive(&mut driver) => driver = None,
        }
    };
    let upstream = talk.state().upstream.clone();
    let (Ok((client_end, server_end)), Some(upstream)) = (ends, upstream) else {
        return End::Broken;
    };
    let (Some(by_client), Some(by_server)) = (unsaid(client_end), unsaid(server_end)) else {
        return End::Broken;
    };
    let client = Side {
        stream: client,
        said: &by_client,
    };
    let upstream = Side {
        stream: &upstream,
        said: &by_server,
    };
    relay::relay(client, upstream, visit.ward.pace()).await
}

/// What hyper has read and was not its to read.
fn unsaid(end: Upgraded) -> Option<bytes::Bytes> {
    let parts = end.downcast::<TokioIo<Shared>>().ok()?;
    Some(parts.read_buf)
}

async fn drive(driver: &mut Option<Driver>) {
    match driver {
        Some(driver) => Pin::new(driver).await,
        None => std::future::pending().await,
    }
}

async fn linger(client: &TcpStream) {
    let mut bytes = Vec::new();
    let mut read = 0;
    let rest = async {
        while read < LINGER_BYTES_MAX {
            bytes.clear();
            match socket::read_more(client, &mut bytes, 16 * 1024).await {
                Ok(0) | Err(_) => return,
                Ok(more) => read += more,
            }
        }
    };
    let _ = timeout(LINGER_TIMEOUT, rest).await;
}

fn finish(client: &TcpStream, talk: &Talk) {
    socket::finish(client);
    if let Some(upstream) = &talk.state().upstream {
        socket::finish(upstream);
    }
}

#[cfg(test)]
mod tests;
