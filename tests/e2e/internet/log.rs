//! What arrived: everything that a server of the miniature internet saw, so that a test can say
//! that something did not arrive.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// More than any test makes; one that does has a loop in it.
const ENTRIES_MAX: usize = 500_000;
/// A ClientHello and a request fit.
pub(super) const SAID_BYTES_MAX: usize = 16 * 1024;

/// A connection that was accepted.
#[derive(Clone, Debug)]
pub struct Connection {
    /// When.
    pub at: Instant,
    /// Where it was accepted.
    pub local: SocketAddr,
    /// Where it came from.
    pub peer: SocketAddr,
    /// The first that was said, as it came off the wire.
    pub said: Vec<u8>,
    /// How much was said.
    pub bytes: u64,
    /// Whether it is still open.
    pub open: bool,
}

/// A request over HTTP.
#[derive(Clone, Debug)]
pub struct Request {
    /// When.
    pub at: Instant,
    /// Where it was accepted.
    pub local: SocketAddr,
    /// The name in the ClientHello; nothing without TLS.
    pub tls_name: Option<String>,
    /// As GET.
    pub method: String,
    /// What follows the method.
    pub target: String,
    /// The header.
    pub host: String,
}

/// A packet that no connection was needed for.
#[derive(Clone, Debug)]
pub struct Datagram {
    /// When.
    pub at: Instant,
    /// Where it arrived.
    pub local: SocketAddr,
    /// What was in it.
    pub data: Vec<u8>,
}

/// A question to a resolver.
#[derive(Clone, Debug)]
pub struct Query {
    /// When.
    pub at: Instant,
    /// Which resolver.
    pub local: SocketAddr,
    /// As it was asked, capitals and all.
    pub name: String,
    /// 1 is A, 28 is AAAA.
    pub kind: u16,
    /// The whole message.
    pub message: Vec<u8>,
}

/// Where a packet was going.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Destination {
    /// Of the internet protocol: 6 is TCP, 17 is UDP.
    pub protocol: u8,
    /// The address.
    pub address: IpAddr,
    /// The port; the type for ICMP, 0 where there is no such thing.
    pub port: u16,
}

/// All that arrived at one place.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    connections: BTreeMap<u64, Connection>,
    requests: Vec<Request>,
    datagrams: Vec<Datagram>,
    queries: Vec<Query>,
    packets: BTreeMap<Destination, u64>,
}

/// One open connection, for the server that has it. It is closed when this is dropped.
#[derive(Debug)]
pub(super) struct Open {
    log: Log,
    number: u64,
    /// Where it was accepted.
    pub(super) local: SocketAddr,
}

// === impl Log ===

impl Log {
    /// Connections in the order in which they came.
    pub fn connections(&self) -> Vec<Connection> {
        self.entries().connections.values().cloned().collect()
    }

    /// Requests in the order in which they came.
    pub fn requests(&self) -> Vec<Request> {
        self.entries().requests.clone()
    }

    /// Datagrams in the order in which they came.
    pub fn datagrams(&self) -> Vec<Datagram> {
        self.entries().datagrams.clone()
    }

    /// Questions in the order in which they came.
    pub fn queries(&self) -> Vec<Query> {
        self.entries().queries.clone()
    }

    /// How many packets came off the cable for each destination, whoever listens there or not.
    pub fn packets(&self) -> BTreeMap<Destination, u64> {
        self.entries().packets.clone()
    }

    /// Whether these bytes arrived anywhere, in whatever form.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        let within = |text: &[u8]| text.windows(bytes.len()).any(|window| window == bytes);
        let entries = self.entries();
        entries.connections.values().any(|one| within(&one.said))
            || entries.datagrams.iter().any(|one| within(&one.data))
            || entries.queries.iter().any(|one| within(&one.message))
            || entries.requests.iter().any(|one| {
                within(one.target.as_bytes())
                    || within(one.host.as_bytes())
                    || one
                        .tls_name
                        .as_deref()
                        .is_some_and(|name| within(name.as_bytes()))
            })
    }

    /// Starts again with nothing.
    pub fn forget(&self) {
        let mut entries = self.entries();
        *entries = Entries {
            // Who is connected still writes to its number.
            next: entries.next,
            ..Entries::default()
        };
    }

    pub(super) fn open(&self, local: SocketAddr, peer: SocketAddr) -> Open {
        let mut entries = self.entries();
        let number = entries.next;
        entries.next += 1;
        assert!(
            entries.connections.len() < ENTRIES_MAX,
            "too many connections"
        );
        let connection = Connection {
            at: Instant::now(),
            local,
            peer,
            said: Vec::new(),
            bytes: 0,
            open: true,
        };
        entries.connections.insert(number, connection);
        Open {
            log: self.clone(),
            number,
            local,
        }
    }

    pub(super) fn request(&self, request: Request) {
        let mut entries = self.entries();
        assert!(entries.requests.len() < ENTRIES_MAX, "too many requests");
        entries.requests.push(request);
    }

    pub(super) fn datagram(&self, local: SocketAddr, data: &[u8]) {
        let mut entries = self.entries();
        assert!(entries.datagrams.len() < ENTRIES_MAX, "too many datagrams");
        entries.datagrams.push(Datagram {
            at: Instant::now(),
            local,
            data: data.to_vec(),
        });
    }

    pub(super) fn query(&self, query: Query) {
        let mut entries = self.entries();
        assert!(entries.queries.len() < ENTRIES_MAX, "too many questions");
        entries.queries.push(query);
    }

    pub(super) fn packet(&self, destination: Destination) {
        let mut entries = self.entries();
        assert!(entries.packets.len() < ENTRIES_MAX, "too many destinations");
        *entries.packets.entry(destination).or_default() += 1;
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap()
    }
}

// === impl Open ===

impl Open {
    pub(super) fn said(&self, bytes: &[u8]) {
        let mut entries = self.log.entries();
        // Nothing is there when it was forgotten meanwhile.
        let Some(connection) = entries.connections.get_mut(&self.number) else {
            return;
        };
        connection.bytes += bytes.len() as u64;
        let room = SAID_BYTES_MAX - connection.said.len();
        connection
            .said
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut entries = self.log.entries();
        if let Some(connection) = entries.connections.get_mut(&self.number) {
            connection.open = false;
        }
    }
}
