//! Port 443: the name is the one in the first message of TLS.

use super::check::{Denial, Ground, Said};
use super::hello::{Hello, HelloReader, NoHello};
use super::opening::Opening;
use super::relay::End;
use super::socket;
use super::visit::Visit;
use crate::ward::Policy;
use k8e_model::egress::DenyReason;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// For the hello to arrive. Clients send it at once; over a slow link inside it takes a moment.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Read at once: most hellos whole, and not much of what may come after.
const READ_BYTES: usize = 4096;

/// Reads the hello, decides, and carries the rest.
pub(super) async fn handle(
    visit: &Visit,
    client: &TcpStream,
    changes: &mut watch::Receiver<Arc<Policy>>,
) -> Result<End, Denial> {
    let mut opening = Opening::default();
    let read = timeout(HELLO_TIMEOUT, read_hello(client, &mut opening)).await;
    let policy = Arc::clone(&changes.borrow_and_update());
    let read = match read {
        Ok(Ok(read)) => read,
        // It said nothing or too little, and left or waits for us to speak.
        Ok(Err(_)) | Err(_) => return Err(unfinished(&opening)),
    };
    let said = match read {
        Ok(hello) => {
            let said = hello.said();
            opening.hello = Some(hello);
            said
        }
        Err(NoHello::NotTls) if visit.ground(&policy)? != Ground::ByName => Said::Nothing,
        Err(NoHello::NotTls | NoHello::Malformed) => {
            return Err(Denial::by(DenyReason::Malformed));
        }
    };
    let pass = visit.by_said(&policy, &said).await?;
    visit.carry(client, changes, &pass, opening).await
}

/// The outer error is the connection's.
async fn read_hello(
    client: &TcpStream,
    opening: &mut Opening,
) -> io::Result<Result<Hello, NoHello>> {
    let mut reader = HelloReader::default();
    loop {
        let before = opening.bytes.len();
        if socket::read_more(client, &mut opening.bytes, READ_BYTES).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match reader.take(opening.bytes.get(before..).unwrap_or_default()) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                opening.hello_bytes = reader.taken();
                return Ok(Ok(hello));
            }
            Err(no_hello) => return Ok(Err(no_hello)),
        }
    }
}

fn unfinished(opening: &Opening) -> Denial {
    Denial::by(if opening.bytes.is_empty() {
        DenyReason::NoName
    } else {
        DenyReason::Malformed
    })
}

// === impl Hello ===

impl Hello {
    fn said(&self) -> Said {
        match &self.name {
            name if self.encrypted => Said::Encrypted(name.clone()),
            Some(name) => Said::Name(name.clone()),
            None => Said::Nothing,
        }
    }
}
