//! Connections that stop being HTTP: WebSockets, and tunnels through a proxy. Both repeat what
//! they are told.

use super::{Body, empty, status};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper::{Response, StatusCode};
use hyper_util::rt::TokioIo;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// From RFC 6455.
const MAGIC: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;
const OPCODE: u8 = 0x0f;
const LAST: u8 = 0x80;

/// Longer messages than a test sends.
const MESSAGE_BYTES_MAX: usize = 65_535;

/// Becomes a WebSocket.
pub(super) fn accept(request: hyper::Request<Incoming>) -> Response<Body> {
    let key = request.headers().get("sec-websocket-key");
    let Some(key) = key.and_then(|key| key.to_str().ok()) else {
        return status(StatusCode::BAD_REQUEST);
    };
    let proof = digest(
        &SHA1_FOR_LEGACY_USE_ONLY,
        format!("{key}{MAGIC}").as_bytes(),
    );
    let proof = BASE64_STANDARD.encode(proof);
    let upgrade = hyper::upgrade::on(request);
    tokio::spawn(async move {
        if let Ok(stream) = upgrade.await {
            // It ends when the other side does.
            drop(repeat_messages(TokioIo::new(stream)).await);
        }
    });
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, "Upgrade".parse().unwrap());
    headers.insert(UPGRADE, "websocket".parse().unwrap());
    headers.insert("sec-websocket-accept", proof.parse().unwrap());
    response
}

/// Becomes a tunnel to nowhere.
pub(super) async fn tunnel(upgrade: OnUpgrade) {
    let Ok(stream) = upgrade.await else { return };
    let (mut reader, mut writer) = tokio::io::split(TokioIo::new(stream));
    // It ends when the other side does.
    drop(tokio::io::copy(&mut reader, &mut writer).await);
}

async fn repeat_messages<S>(mut stream: S) -> std::io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let kind = stream.read_u8().await? & OPCODE;
        let length = match stream.read_u8().await? & 0x7f {
            126 => usize::from(stream.read_u16().await?),
            127 => return Ok(()),
            short => usize::from(short),
        };
        let mut mask = [0; 4];
        stream.read_exact(&mut mask).await?;
        let mut data = vec![0; length.min(MESSAGE_BYTES_MAX)];
        stream.read_exact(&mut data).await?;
        for (byte, mask) in data.iter_mut().zip(mask.iter().cycle()) {
            *byte ^= mask;
        }
        let kind = if kind == PING { PONG } else { kind };
        stream.write_all(&frame(kind, &data)).await?;
        if kind == CLOSE {
            return Ok(());
        }
    }
}

fn frame(kind: u8, data: &[u8]) -> Vec<u8> {
    let mut frame = vec![LAST | kind];
    match u8::try_from(data.len()) {
        Ok(short) if short < 126 => frame.push(short),
        Ok(_) | Err(_) => {
            let length = u16::try_from(data.len()).expect("it was bounded when it was read");
            frame.push(126);
            frame.extend_from_slice(&length.to_be_bytes());
        }
    }
    frame.extend_from_slice(data);
    frame
}
