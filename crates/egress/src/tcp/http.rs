//! HTTP/1 proxy on port 80: each request is checked by its `Host`.
//!
//! A connection can carry many requests, each for another host. So requests are parsed and written
//! again by hyper: where one ends and the next begins is decided here and not by the server, which
//! prevents request smuggling.

pub(super) mod fuzzing;
mod head;
mod metered_io;
mod proxy;

use super::connection::Connection;
use super::policy_check::Denial;
use super::relay::{self, End, Endpoint};
use super::socket;
use crate::sandbox_net::Policy;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8e_model::egress::DenyReason;
use metered_io::MeteredIo;
use proxy::{Driver, HttpProxy};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// Largest head of a request, in bytes. Servers accept 8 to 64 KiB.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Timeout from the end of one request to the end of the next head: keep-alive time of common servers.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// How long, and for how many bytes, a client is read after a 403 (lingering close): one that is still
/// sending when the socket closes would be reset and never see the response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1024 * 1024;

/// A client that has half-closed and gets no response is taken for gone after this long (at most twice
/// this long): close and half-close look the same, and most clients that close have given up.
const ABANDONED_AFTER: Duration = Duration::from_secs(30);

/// Checks and forwards each request, until a peer closes.
pub(super) async fn handle(
    conn: &Connection,
    client: &Arc<TcpStream>,
    changes: &mut watch::Receiver<Arc<Policy>>,
) -> Result<End, Denial> {
    let (drivers, new_drivers) = mpsc::channel(1);
    let proxy = Arc::new(HttpProxy::new(conn.clone(), drivers));
    let grant = || proxy.state().grant.clone();
    tokio::select! {
        biased;
        denial = conn.revoked(changes, grant) => Err(denial),
        end = serve(conn, client, &proxy, new_drivers) => end,
        () = relay::idle_for(&proxy.progress, relay::IDLE_MAX) => Ok(End::Idle),
        () = socket::broken(client) => Ok(End::Broken),
        () = abandoned(client, &proxy.progress) => Ok(End::Broken),
    }
}

async fn abandoned(client: &TcpStream, progress: &AtomicU64) {
    loop {
        relay::idle_for(progress, ABANDONED_AFTER).await;
        if socket::has_ended(client) {
            return;
        }
    }
}

async fn serve(
    conn: &Connection,
    client: &Arc<TcpStream>,
    proxy: &Arc<HttpProxy>,
    mut drivers: mpsc::Receiver<Driver>,
) -> Result<End, Denial> {
    let io = proxy.metered(client);
    let service = service_fn(|request| Arc::clone(proxy).forward(request));
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
                // The server has closed, so the client should send its next request on another
                // connection.
                driver = None;
                connection.as_mut().graceful_shutdown();
            }
        }
    };
    let (denial, switched, refused, granted) = {
        let mut state = proxy.state();
        let switched = state.switched.take();
        (
            state.denial.take(),
            switched,
            state.refused,
            state.grant.is_some(),
        )
    };
    if let Some(denial) = denial {
        return Err(denial);
    }
    match served {
        Err(error) if error.is_parse() => Err(Denial::by(DenyReason::Malformed)),
        _ if !granted && !refused => Err(Denial::by(DenyReason::NoName)),
        Err(_) => Ok(End::Broken),
        Ok(()) => match switched {
            Some(ends) => Ok(switch(conn, client, proxy, driver, ends).await),
            None => {
                if refused {
                    linger(client).await;
                }
                finish(client, proxy);
                Ok(End::Finished)
            }
        },
    }
}

/// After 101 Switching Protocols (WebSocket): relays the rest without parsing.
async fn switch(
    conn: &Connection,
    client: &TcpStream,
    proxy: &HttpProxy,
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
    let upstream = proxy.state().upstream.clone();
    let (Ok((client_end, server_end)), Some(upstream)) = (ends, upstream) else {
        return End::Broken;
    };
    let (Some(from_client), Some(from_server)) = (read_ahead(client_end), read_ahead(server_end))
    else {
        return End::Broken;
    };
    let client = Endpoint {
        stream: client,
        pending: &from_client,
    };
    let upstream = Endpoint {
        stream: &upstream,
        pending: &from_server,
    };
    relay::relay(client, upstream, conn.sandbox.rate_limit()).await
}

/// Bytes after the upgrade that hyper has already read.
fn read_ahead(end: Upgraded) -> Option<bytes::Bytes> {
    let parts = end.downcast::<TokioIo<MeteredIo>>().ok()?;
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

fn finish(client: &TcpStream, proxy: &HttpProxy) {
    socket::finish(client);
    if let Some(upstream) = &proxy.state().upstream {
        socket::finish(upstream);
    }
}

#[cfg(test)]
mod tests;
