//! What every socket of a connection is told, on either side of the gate.

use bytes::BufMut as _;
use rustix::net::RecvFlags;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// A peer that is gone without a word is found out this long after its last, plus the probes.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(60))
    .with_interval(Duration::from_secs(20))
    .with_retries(6);

/// Small writes go at once, dead peers are noticed, and the socket is reset when it is dropped:
/// whatever ends a connection early, nothing that waits in its buffers is sent any more.
pub(super) fn prepare(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    // None of them fails on a TCP socket; a connection without them would still be one.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_keepalive(&KEEPALIVE);
    let _ = socket.set_linger(Some(Duration::ZERO));
}

/// Both sides have said all: what is left in the buffers still goes out after the socket is
/// dropped.
pub(super) fn finish(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(None);
}

/// Waits until the connection is broken. One whose peer has closed is not.
pub(super) async fn broken(stream: &TcpStream) {
    if let Err(_ended) = stream.ready(Interest::ERROR).await {}
}

/// Whether the peer has said all, and all of it was read.
pub(super) fn has_ended(stream: &TcpStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(stream, &mut [0; 1], flags), Ok((_, 0)))
}

/// Reads at least a byte onto the end of `bytes`, at most `room`; 0 at the end.
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

/// Writes all of it.
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
