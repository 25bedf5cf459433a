//! One question to one upstream, over UDP and, where that is not enough, over TCP.

use super::answer::{self, Answer, NoAnswer};
use super::message::HEADER_BYTES;
use k8e_model::egress::HostName;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use thiserror::Error;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

/// Questions here carry no EDNS, so a reply over UDP has 512 bytes; some servers do not care.
const UDP_REPLY_BYTES_MAX: usize = 4096;

/// Enough for a thousand addresses, of which [`answer::ADDRESSES_MAX`] are used.
const TCP_REPLY_BYTES_MAX: usize = 16 * 1024;

/// Packets that are no reply to the question before the rest is asked over TCP: somebody is
/// guessing ids, and nobody can guess his way into a connection.
const STRANGE_PACKETS_MAX: usize = 16;

/// Why there is no answer from this upstream.
#[derive(Debug, Error)]
pub(super) enum ExchangeError {
    #[error("talk to it: {0}")]
    Io(#[from] io::Error),
    #[error("it sent what is no reply to the question, or is broken")]
    Malformed,
    #[error("it sent a reply of {0} bytes")]
    Size(usize),
}

/// Asks for the addresses of a name. The caller sets the time this may take.
///
/// A socket of its own for each question, connected, so that the kernel chooses the port at random
/// and drops what comes from anybody else.
pub(super) async fn ask(upstream: SocketAddr, host: &HostName) -> Result<Answer, ExchangeError> {
    match ask_udp(upstream, host).await? {
        Some(Answer::Truncated) | None => ask_tcp(upstream, host).await,
        Some(answer) => Ok(answer),
    }
}

/// None when too much came that was not the reply.
async fn ask_udp(upstream: SocketAddr, host: &HostName) -> Result<Option<Answer>, ExchangeError> {
    let any = match upstream {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(upstream).await?;
    let (id, question) = question(host)?;
    socket.send(&question).await?;
    let mut buffer = vec![0; UDP_REPLY_BYTES_MAX];
    for _ in 0..STRANGE_PACKETS_MAX {
        let length = socket.recv(&mut buffer).await?;
        match answer::read(&buffer[..length], id, host) {
            Ok(answer) => return Ok(Some(answer)),
            Err(NoAnswer::NotOurs) => {}
            Err(NoAnswer::Malformed) => return Err(ExchangeError::Malformed),
        }
    }
    Ok(None)
}

async fn ask_tcp(upstream: SocketAddr, host: &HostName) -> Result<Answer, ExchangeError> {
    let mut stream = TcpStream::connect(upstream).await?;
    let (id, question) = question(host)?;
    let length = u16::try_from(question.len()).map_err(|_| ExchangeError::Malformed)?;
    let mut message = length.to_be_bytes().to_vec();
    message.extend_from_slice(&question);
    stream.write_all(&message).await?;
    let length = usize::from(stream.read_u16().await?);
    if !(HEADER_BYTES..=TCP_REPLY_BYTES_MAX).contains(&length) {
        return Err(ExchangeError::Size(length));
    }
    let mut reply = vec![0; length];
    stream.read_exact(&mut reply).await?;
    match answer::read(&reply, id, host) {
        Ok(Answer::Truncated) | Err(_) => Err(ExchangeError::Malformed),
        Ok(answer) => Ok(answer),
    }
}

fn question(host: &HostName) -> Result<(u16, Vec<u8>), ExchangeError> {
    let mut id = [0; 2];
    getrandom::fill(&mut id).map_err(io::Error::from)?;
    let id = u16::from_be_bytes(id);
    let bytes = answer::question(id, host).ok_or(ExchangeError::Malformed)?;
    Ok((id, bytes))
}
