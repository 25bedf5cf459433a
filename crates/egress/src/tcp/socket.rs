//! Socket options and IO helpers for both sockets of a proxied connection.

use bytes::BufMut as _;
use rustix::net::RecvFlags;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// TCP keep-alive: a dead peer is detected after 60 s of silence and 6 probes of 20 s.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(60))
    .with_interval(Duration::from_secs(20))
    .with_retries(6);

/// Sets `TCP_NODELAY`, keep-alive and `SO_LINGER` 0: the socket is reset when it is dropped, so when a
/// connection ends early nothing in its send buffer is sent any more.
pub(super) fn prepare(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    // None of them fails on a TCP socket, and a connection works without them.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_keepalive(&KEEPALIVE);
    let _ = socket.set_linger(Some(Duration::ZERO));
}

/// Clears `SO_LINGER` after EOF from both peers: the send buffer is still sent after the drop.
pub(super) fn finish(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(None);
}

/// Waits for an error of the connection (reset, keep-alive). A peer that has closed is none.
pub(super) async fn broken(stream: &TcpStream) {
    if let Err(_ended) = stream.ready(Interest::ERROR).await {}
}

/// Whether the next read would return EOF.
pub(super) fn has_ended(stream: &TcpStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(stream, &mut [0; 1], flags), Ok((_, 0)))
}

/// Appends what can be read to `bytes`, at least one byte and at most `room`; 0 at EOF.
pub(super) async fn read_more(
    stream: &TcpStream,
    bytes: &mut Vec<u8>,
    room: usize,
) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        bytes.reserve_exact(room);
        match stream.try_read_buf(&mut (&mut *bytes).limit(room)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
    }
}

pub(super) async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
