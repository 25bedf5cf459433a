//! TLS on port 443: checked by the SNI of the ClientHello, then relayed without decryption.

use super::client_hello::{ClientHello, ClientHelloError, ClientHelloReader};
use super::connection::Connection;
use super::hello_retry::Prefix;
use super::policy_check::{AddressVerdict, Denial, RequestedName};
use super::relay::End;
use super::socket;
use crate::sandbox_net::Policy;
use k8e_model::egress::DenyReason;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// Timeout for the ClientHello. Clients send it at once.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes per read: enough for most ClientHellos.
const READ_BYTES: usize = 4096;

/// Reads the ClientHello, checks its SNI, and relays the connection.
pub(super) async fn handle(
    conn: &Connection,
    client: &TcpStream,
    changes: &mut watch::Receiver<Arc<Policy>>,
) -> Result<End, Denial> {
    let mut prefix = Prefix::default();
    let read = timeout(HELLO_TIMEOUT, read_hello(client, &mut prefix)).await;
    let policy = Arc::clone(&changes.borrow_and_update());
    let read = match read {
        Ok(Ok(read)) => read,
        // An incomplete ClientHello before EOF or the timeout.
        Ok(Err(_)) | Err(_) => return Err(unfinished(&prefix)),
    };
    let requested = match read {
        Ok(hello) => {
            let requested = hello.requested_name();
            prefix.hello = Some(hello);
            requested
        }
        Err(ClientHelloError::NotTls)
            if conn.address_verdict(&policy)? != AddressVerdict::NeedsName =>
        {
            RequestedName::Missing
        }
        Err(ClientHelloError::NotTls | ClientHelloError::Malformed) => {
            return Err(Denial::by(DenyReason::Malformed));
        }
    };
    let grant = conn.by_requested_name(&policy, &requested).await?;
    conn.relay(client, changes, &grant, prefix).await
}

/// The outer error is of the socket, the inner one of the parser.
async fn read_hello(
    client: &TcpStream,
    prefix: &mut Prefix,
) -> io::Result<Result<ClientHello, ClientHelloError>> {
    let mut reader = ClientHelloReader::default();
    loop {
        let before = prefix.bytes.len();
        if socket::read_more(client, &mut prefix.bytes, READ_BYTES).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match reader.take(prefix.bytes.get(before..).unwrap_or_default()) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                prefix.hello_bytes = reader.taken();
                return Ok(Ok(hello));
            }
            Err(no_hello) => return Ok(Err(no_hello)),
        }
    }
}

fn unfinished(prefix: &Prefix) -> Denial {
    Denial::by(if prefix.bytes.is_empty() {
        DenyReason::NoName
    } else {
        DenyReason::Malformed
    })
}

// === impl ClientHello ===

impl ClientHello {
    fn requested_name(&self) -> RequestedName {
        match &self.name {
            name if self.encrypted => RequestedName::Encrypted(name.clone()),
            Some(name) => RequestedName::Name(name.clone()),
            None => RequestedName::Missing,
        }
    }
}
