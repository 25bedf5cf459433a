//! TLS HelloRetryRequest: a second ClientHello must have the SNI that was checked in the first.
//!
//! A TLS server may request a second ClientHello (RFC 8446 4.1.4), and some servers take the name from
//! that one. So after a ClientHello, further bytes of the client are held back until the server has
//! replied; if the reply is a HelloRetryRequest, the name in the second ClientHello must be the same.

use super::client_hello::{ClientHello, ClientHelloError, ClientHelloReader, HELLO_BYTES_MAX};
use super::policy_check::Denial;
use super::socket;
use k8e_model::egress::DenyReason;
use std::io;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Timeout for the server's first record, and again for a second ClientHello. No client waits longer
/// for a TLS handshake.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes up to the end of a ServerHello's random: record and handshake headers, version, random.
const SERVER_HELLO_BYTES: usize = 5 + 4 + 2 + 32;

/// Bytes per read.
const READ_BYTES: usize = 4096;

const CONTENT_CHANGE_CIPHER: u8 = 20;
const CONTENT_ALERT: u8 = 21;
const CONTENT_HANDSHAKE: u8 = 22;
const CONTENT_DATA: u8 = 23;
const SERVER_HELLO: u8 = 2;

/// The random that marks a ServerHello as a HelloRetryRequest: SHA-256 of "HelloRetryRequest".
pub(super) const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

/// Bytes read from the client before the policy check.
#[derive(Default)]
pub(super) struct Prefix {
    /// The ClientHello, on a TLS connection.
    pub(super) hello: Option<ClientHello>,
    pub(super) bytes: Vec<u8>,
    /// Length of the ClientHello at the start of `bytes`.
    pub(super) hello_bytes: usize,
}

/// Bytes read from each peer that are not yet written to the other.
pub(super) struct Pending {
    pub(super) from_client: Vec<u8>,
    pub(super) from_server: Vec<u8>,
}

// === impl Prefix ===

impl Prefix {
    /// Writes the ClientHello to the server and reads its reply, until nothing more can change the
    /// name. None when a peer has closed or a timeout has passed.
    pub(super) async fn forward(
        mut self,
        client: &TcpStream,
        server: &TcpStream,
    ) -> Result<Option<Pending>, Denial> {
        let Some(hello) = self.hello.take() else {
            return Ok(Some(Pending {
                from_client: self.bytes,
                from_server: Vec::new(),
            }));
        };
        let rest = self.bytes.split_off(self.hello_bytes.min(self.bytes.len()));
        let asked = async {
            socket::write_all(server, &self.bytes).await?;
            read_server_hello(server).await
        };
        let Ok(Ok(reply)) = timeout(REPLY_TIMEOUT, asked).await else {
            return Ok(None);
        };
        if !is_retry_request(&reply) {
            return Ok(Some(Pending {
                from_client: rest,
                from_server: reply,
            }));
        }
        let again = async {
            socket::write_all(client, &reply).await?;
            second_hello(client, rest).await
        };
        match timeout(REPLY_TIMEOUT, again).await {
            Ok(Ok(Second::ClientHello(second, from_client))) if second == hello => {
                Ok(Some(Pending {
                    from_client,
                    from_server: Vec::new(),
                }))
            }
            Ok(Ok(Second::ClientHello(second, _))) => Err(Denial {
                name: second.name,
                ..Denial::by(DenyReason::Malformed)
            }),
            Ok(Ok(Second::Malformed)) => Err(Denial {
                name: hello.name,
                ..Denial::by(DenyReason::Malformed)
            }),
            Ok(Ok(Second::End(from_client))) => Ok(Some(Pending {
                from_client,
                from_server: Vec::new(),
            })),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }
}

/// What a client sends after a HelloRetryRequest.
enum Second {
    /// A ClientHello, with all bytes before and after it.
    ClientHello(ClientHello, Vec<u8>),
    /// The end of the stream, after these bytes.
    End(Vec<u8>),
    Malformed,
}

/// Reads enough of the server's first record to tell whether it is a HelloRetryRequest.
async fn read_server_hello(server: &TcpStream) -> io::Result<Vec<u8>> {
    let mut reply = Vec::new();
    while reply.len() < SERVER_HELLO_BYTES
        && reply.first().is_none_or(|kind| *kind == CONTENT_HANDSHAKE)
    {
        if socket::read_more(server, &mut reply, READ_BYTES).await? == 0 {
            break;
        }
    }
    Ok(reply)
}

fn is_retry_request(reply: &[u8]) -> bool {
    let kind = reply.first().zip(reply.get(5));
    kind == Some((&CONTENT_HANDSHAKE, &SERVER_HELLO))
        && reply.get(11..SERVER_HELLO_BYTES) == Some(&RETRY)
}

/// Reads up to the second ClientHello. Before it may come records that were in flight: change cipher
/// spec, alerts, early data.
async fn second_hello(client: &TcpStream, mut bytes: Vec<u8>) -> io::Result<Second> {
    let mut at = 0;
    loop {
        let rest = bytes.get(at..).unwrap_or_default();
        match rest {
            [CONTENT_HANDSHAKE, ..] => break,
            [
                CONTENT_CHANGE_CIPHER | CONTENT_ALERT | CONTENT_DATA,
                _,
                _,
                high,
                low,
                ..,
            ] => {
                at += 5 + usize::from(u16::from_be_bytes([*high, *low]));
                continue;
            }
            [] | [CONTENT_CHANGE_CIPHER | CONTENT_ALERT | CONTENT_DATA, ..] => {}
            _ => return Ok(Second::Malformed),
        }
        if at.max(bytes.len()) > HELLO_BYTES_MAX {
            return Ok(Second::Malformed);
        }
        if socket::read_more(client, &mut bytes, READ_BYTES).await? == 0 {
            return Ok(Second::End(bytes));
        }
    }
    let mut reader = ClientHelloReader::default();
    loop {
        match reader.take(bytes.get(at..).unwrap_or_default()) {
            Ok(Some(hello)) => return Ok(Second::ClientHello(hello, bytes)),
            Err(ClientHelloError::NotTls | ClientHelloError::Malformed) => {
                return Ok(Second::Malformed);
            }
            Ok(None) => at = bytes.len(),
        }
        if socket::read_more(client, &mut bytes, READ_BYTES).await? == 0 {
            return Ok(Second::End(bytes));
        }
    }
}
