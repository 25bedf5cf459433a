//! A connection to a service in the sandbox, carried over the call: so a service that listens on
//! loopback only can be reached, and under every runtime alike.
//!
//! Back-pressure is the connections' own: neither side is read before what it said was taken.

use crate::error::Error;
use crate::exec::has_closed;
use bytes::BytesMut;
use k8e_wire::proto::{Connected, Done, End, Forward, input::Input, reply::Reply};
use k8e_wire::{CHUNK_BYTES, GuestEnd, ReplySink, Requests};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::oneshot;

/// A service on loopback takes a connection at once, or its queue is full.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// How often to look whether the host is there while the service takes nothing.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Connects, says so, and carries bytes until both directions are over or the host closes.
pub(crate) async fn forward(end: &mut GuestEnd, request: Forward) -> Result<Reply, Error> {
    let mut service = connect(&request).await?;
    end.replies.send(Reply::Connected(Connected {})).await?;
    let (from_service, to_service) = service.split();
    let (sent_all, all_is_sent) = oneshot::channel();
    let GuestEnd { requests, replies } = end;
    let out = async {
        carry_out(from_service, replies, &request).await?;
        // What the service does not answer any more it may still read.
        let _ = all_is_sent.await;
        Ok(Reply::Done(Done::default()))
    };
    tokio::select! {
        biased;
        last = out => last,
        gone = carry_in(requests, to_service, sent_all) => Err(gone),
    }
}

/// The first address that somebody listens on.
async fn connect(request: &Forward) -> Result<TcpStream, Error> {
    let port = u16::try_from(request.port)
        .ok()
        .filter(|port| *port > 0)
        .ok_or_else(|| Error::Invalid(format!("there is no port {}", request.port)))?;
    let mut refused = None;
    for address in addresses(&request.host)? {
        let address = SocketAddr::new(address, port);
        let connected = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(address)).await;
        match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => {
                // Answers are waited for; who sends much fills a packet anyway.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            // What the first address says is what people know.
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(Error::Precondition(match refused {
        Some(error) if error.kind() != io::ErrorKind::ConnectionRefused => {
            format!("port {port} does not take a connection: {error}")
        }
        _ => format!("nobody listens on port {port} in the sandbox"),
    }))
}

fn addresses(host: &str) -> Result<Vec<IpAddr>, Error> {
    let both = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    if host.is_empty() || host == "localhost" {
        return Ok(both);
    }
    match host.parse::<IpAddr>() {
        Ok(address) if address == Ipv4Addr::LOCALHOST || address.is_unspecified() => Ok(both),
        Ok(address) if address.is_loopback() => Ok(vec![address]),
        _ => Err(Error::Invalid(format!("{host:?} is not loopback"))),
    }
}

/// What the service sends, up to its end.
async fn carry_out(
    mut service: ReadHalf<'_>,
    replies: &mut ReplySink,
    request: &Forward,
) -> Result<(), Error> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(CHUNK_BYTES);
        let name = request.port.to_string();
        let read = service.read_buf(&mut buffer).await;
        if read.map_err(Error::os("read from port", name.as_bytes()))? == 0 {
            return Ok(replies.send(Reply::End(End {})).await?);
        }
        while !buffer.is_empty() {
            let chunk = buffer.split_to(buffer.len().min(CHUNK_BYTES)).freeze();
            replies.send(Reply::Data(chunk)).await?;
        }
    }
}

/// What the host sends, until it closes.
async fn carry_in(
    requests: &mut Requests,
    mut service: WriteHalf<'_>,
    sent_all: oneshot::Sender<()>,
) -> Error {
    let mut sent_all = Some(sent_all);
    // A service may answer before it read everything, and close: the rest is read and dropped.
    let mut reads = true;
    loop {
        match requests.input().await {
            Ok(Some(Input::Data(data))) if reads && sent_all.is_some() => {
                match write(&mut service, &data, requests).await {
                    Ok(()) => {}
                    Err(Error::Cancelled) => return Error::Cancelled,
                    Err(_) => reads = false,
                }
            }
            Ok(Some(Input::End(_))) => {
                let _ = service.shutdown().await;
                if let Some(sent_all) = sent_all.take() {
                    let _ = sent_all.send(());
                }
            }
            Ok(Some(Input::Data(_) | Input::Signal(_))) => {}
            Ok(None) => return Error::Cancelled,
            Err(error) => return error.into(),
        }
    }
}

/// Writes all of it, unless the host goes away meanwhile.
async fn write(service: &mut WriteHalf<'_>, data: &[u8], host: &Requests) -> Result<(), Error> {
    let mut left = data;
    while !left.is_empty() {
        match tokio::time::timeout(LOOK_EVERY, service.write(left)).await {
            Ok(written) => left = &left[written.map_err(Error::os("write to", b"a port"))?..],
            Err(_) if has_closed(host) => return Err(Error::Cancelled),
            Err(_) => {}
        }
    }
    Ok(())
}
