//! The first words of a connection, passed on so that the name which was checked is the one that
//! counts.
//!
//! A TLS server may ask for a second hello (HelloRetryRequest, RFC 8446 4.1.4), and some then take
//! the name from that one. So after a hello, what a client says next waits until the server has
//! answered; and if that answer asks for another hello, the name in it must be the same.

use super::check::Denial;
use super::hello::{HELLO_BYTES_MAX, Hello, HelloReader, NoHello};
use super::socket;
use k8e_model::egress::DenyReason;
use std::io;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// For the server's first words, and again for a second hello. Nobody waits longer for TLS to begin.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Up to the end of a ServerHello's random: record and handshake headers, version, random.
const ANSWER_BYTES: usize = 5 + 4 + 2 + 32;

/// Read at once.
const READ_BYTES: usize = 4096;

const CONTENT_CHANGE_CIPHER: u8 = 20;
const CONTENT_ALERT: u8 = 21;
const CONTENT_HANDSHAKE: u8 = 22;
const CONTENT_DATA: u8 = 23;
const SERVER_HELLO: u8 = 2;

/// The random of a ServerHello that is none: SHA-256 of "HelloRetryRequest".
pub(super) const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

/// What a client has said so far.
#[derive(Default)]
pub(super) struct Opening {
    /// The hello, if that is how it began.
    pub(super) hello: Option<Hello>,
    /// As they came.
    pub(super) bytes: Vec<u8>,
    /// How many of them are the hello.
    pub(super) hello_bytes: usize,
}

/// What each side has said that the other was not told yet.
pub(super) struct Unsaid {
    pub(super) by_client: Vec<u8>,
    pub(super) by_server: Vec<u8>,
}

// === impl Opening ===

impl Opening {
    /// Until nothing more can change the name. None when either side has broken off.
    pub(super) async fn pass_on(
        mut self,
        client: &TcpStream,
        server: &TcpStream,
    ) -> Result<Option<Unsaid>, Denial> {
        let Some(hello) = self.hello.take() else {
            return Ok(Some(Unsaid {
                by_client: self.bytes,
                by_server: Vec::new(),
            }));
        };
        let rest = self.bytes.split_off(self.hello_bytes.min(self.bytes.len()));
        let asked = async {
            socket::write_all(server, &self.bytes).await?;
            first_words(server).await
        };
        let Ok(Ok(answer)) = timeout(ANSWER_TIMEOUT, asked).await else {
            return Ok(None);
        };
        if !asks_again(&answer) {
            return Ok(Some(Unsaid {
                by_client: rest,
                by_server: answer,
            }));
        }
        let again = async {
            socket::write_all(client, &answer).await?;
            second_hello(client, rest).await
        };
        match timeout(ANSWER_TIMEOUT, again).await {
            Ok(Ok(Again::Hello(second, by_client))) if second == hello => Ok(Some(Unsaid {
                by_client,
                by_server: Vec::new(),
            })),
            Ok(Ok(Again::Hello(second, _))) => Err(Denial {
                name: second.name,
                ..Denial::by(DenyReason::Malformed)
            }),
            Ok(Ok(Again::Malformed)) => Err(Denial {
                name: hello.name,
                ..Denial::by(DenyReason::Malformed)
            }),
            Ok(Ok(Again::Nothing(by_client))) => Ok(Some(Unsaid {
                by_client,
                by_server: Vec::new(),
            })),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }
}

/// What follows when a server has asked for another hello.
enum Again {
    /// It came, with all that was said before and after.
    Hello(Hello, Vec<u8>),
    /// The client had nothing more to say than this.
    Nothing(Vec<u8>),
    Malformed,
}

/// Enough of what a server says first to know whether it asks for another hello.
async fn first_words(server: &TcpStream) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    while answer.len() < ANSWER_BYTES
        && answer.first().is_none_or(|kind| *kind == CONTENT_HANDSHAKE)
    {
        if socket::read_more(server, &mut answer, READ_BYTES).await? == 0 {
            break;
        }
    }
    Ok(answer)
}

fn asks_again(answer: &[u8]) -> bool {
    let kind = answer.first().zip(answer.get(5));
    kind == Some((&CONTENT_HANDSHAKE, &SERVER_HELLO))
        && answer.get(11..ANSWER_BYTES) == Some(&RETRY)
}

/// Reads up to the second hello. What may come before is what was under way when the server asked.
async fn second_hello(client: &TcpStream, mut bytes: Vec<u8>) -> io::Result<Again> {
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
            _ => return Ok(Again::Malformed),
        }
        if at.max(bytes.len()) > HELLO_BYTES_MAX {
            return Ok(Again::Malformed);
        }
        if socket::read_more(client, &mut bytes, READ_BYTES).await? == 0 {
            return Ok(Again::Nothing(bytes));
        }
    }
    let mut reader = HelloReader::default();
    loop {
        match reader.take(bytes.get(at..).unwrap_or_default()) {
            Ok(Some(hello)) => return Ok(Again::Hello(hello, bytes)),
            Err(NoHello::NotTls | NoHello::Malformed) => return Ok(Again::Malformed),
            Ok(None) => at = bytes.len(),
        }
        if socket::read_more(client, &mut bytes, READ_BYTES).await? == 0 {
            return Ok(Again::Nothing(bytes));
        }
    }
}
