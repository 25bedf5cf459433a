//! TCP forwarding: a connection to a service in the sandbox, relayed over the call. A service that listens on loopback only
//! can be reached, in the same way on every runtime.
//!
//! Backpressure: neither side is read before the data it sent was written to the other.

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

/// Connect timeout: a service on loopback accepts at once, or its backlog is full.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Poll interval for a closed connection while the service does not read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Connects, sends `Connected`, and relays bytes until both directions are closed or the host closes.
pub(crate) async fn forward(end: &mut GuestEnd, request: Forward) -> Result<Reply, Error> {
    let mut service = connect(&request).await?;
    end.replies.send(Reply::Connected(Connected {})).await?;
    let (from_service, to_service) = service.split();
    let (sent_all, all_is_sent) = oneshot::channel();
    let GuestEnd { requests, replies } = end;
    let out = async {
        carry_out(from_service, replies, &request).await?;
        // The service closed its sending direction; it may still read.
        let _ = all_is_sent.await;
        Ok(Reply::Done(Done::default()))
    };
    tokio::select! {
        biased;
        last = out => last,
        gone = carry_in(requests, to_service, sent_all) => Err(gone),
    }
}

/// The first address that accepts a connection.
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
                // TCP_NODELAY: latency counts, and bulk data fills packets anyway.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            // The error of the first address is the most useful one.
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(Error::Precondition(match refused {
        Some(error) if error.kind() != io::ErrorKind::ConnectionRefused => {
            format!("port {port} does not accept a connection: {error}")
        }
        _ => format!("no process listens on port {port} in the sandbox"),
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

/// Relays from the service to the host, to end of file.
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

/// Relays from the host to the service, until the host closes.
async fn carry_in(
    requests: &mut Requests,
    mut service: WriteHalf<'_>,
    sent_all: oneshot::Sender<()>,
) -> Error {
    let mut sent_all = Some(sent_all);
    // A service may answer before it has read everything, and close: the rest is read and dropped.
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
            Ok(Some(_)) => {}
            Ok(None) => return Error::Cancelled,
            Err(error) => return error.into(),
        }
    }
}

/// Writes all bytes, unless the host closes meanwhile.
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
