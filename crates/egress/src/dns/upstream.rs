//! One query to one upstream resolver, over UDP with fallback to TCP.

use super::message::HEADER_BYTES;
use super::reply::{self, Reply, ReplyError};
use k8e_model::egress::HostName;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

/// Largest reply over UDP. Our queries carry no EDNS, so 512 bytes are allowed; some servers send more.
const UDP_REPLY_BYTES_MAX: usize = 4096;

/// Largest reply over TCP: a thousand addresses, of which [`reply::ADDRESSES_MAX`] are used.
const TCP_REPLY_BYTES_MAX: usize = 16 * 1024;

/// Packets over UDP that are not the reply before the query is repeated over TCP: they may be spoofed
/// by somebody who guesses ids, which does not work over TCP.
const STRANGE_PACKETS_MAX: usize = 16;

/// Why there is no reply from this upstream.
#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    #[error("send or receive: {0}")]
    Io(#[from] io::Error),
    #[error("the reply is malformed or does not match the query")]
    Malformed,
    #[error("the reply has {0} bytes, outside {HEADER_BYTES} to {TCP_REPLY_BYTES_MAX}")]
    Size(usize),
}

/// Queries the A records of a name. The caller sets the deadline.
///
/// Each query has its own connected socket, so that the kernel chooses a random source port and drops
/// packets from other addresses.
pub(super) async fn query(upstream: SocketAddr, host: &HostName) -> Result<Reply, UpstreamError> {
    match query_udp(upstream, host).await? {
        Some(Reply::Truncated) | None => query_tcp(upstream, host).await,
        Some(reply) => Ok(reply),
    }
}

/// None after [`STRANGE_PACKETS_MAX`] packets that were not the reply.
async fn query_udp(upstream: SocketAddr, host: &HostName) -> Result<Option<Reply>, UpstreamError> {
    let any = match upstream {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(upstream).await?;
    let (id, query) = new_query(host)?;
    socket.send(&query).await?;
    let mut buffer = vec![0; UDP_REPLY_BYTES_MAX];
    for _ in 0..STRANGE_PACKETS_MAX {
        let length = socket.recv(&mut buffer).await?;
        match reply::read(&buffer[..length], id, host) {
            Ok(reply) => return Ok(Some(reply)),
            Err(ReplyError::NotOurs) => {}
            Err(ReplyError::Malformed) => return Err(UpstreamError::Malformed),
        }
    }
    Ok(None)
}

async fn query_tcp(upstream: SocketAddr, host: &HostName) -> Result<Reply, UpstreamError> {
    let mut stream = TcpStream::connect(upstream).await?;
    let (id, query) = new_query(host)?;
    let length = u16::try_from(query.len()).map_err(|_| UpstreamError::Malformed)?;
    let mut message = length.to_be_bytes().to_vec();
    message.extend_from_slice(&query);
    stream.write_all(&message).await?;
    let length = usize::from(stream.read_u16().await?);
    if !(HEADER_BYTES..=TCP_REPLY_BYTES_MAX).contains(&length) {
        return Err(UpstreamError::Size(length));
    }
    let mut reply = vec![0; length];
    stream.read_exact(&mut reply).await?;
    match reply::read(&reply, id, host) {
        Ok(Reply::Truncated) | Err(_) => Err(UpstreamError::Malformed),
        Ok(reply) => Ok(reply),
    }
}

fn new_query(host: &HostName) -> Result<(u16, Vec<u8>), UpstreamError> {
    let mut id = [0; 2];
    getrandom::fill(&mut id).map_err(io::Error::from)?;
    let id = u16::from_be_bytes(id);
    let bytes = reply::encode_query(id, host).ok_or(UpstreamError::Malformed)?;
    Ok((id, bytes))
}
