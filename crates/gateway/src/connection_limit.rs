//! Connection limit for unauthenticated clients: in total and for each source, from the accept on.
//!
//! Anybody can open connections and send nothing, so a connection counts as unauthenticated from its first moment, and has a
//! deadline. Accepting never waits for one that is silent: when its source has its share, the oldest of that source is
//! closed, and when the listener is full, the oldest of the source that has most. A client authenticates within
//! milliseconds, so the oldest is the least likely to. Then it gives its slot back and counts as authenticated, which has a
//! limit of its own.

use crate::connection::{Attached, Connection};
use crate::metrics::CONNECTIONS_CLOSED;
use crate::source::Source;
use futures::task::AtomicWaker;
use futures::{Stream, StreamExt as _};
use k8e_net::accept::{ConnectionLimit, ConnectionPermit};
use metrics::counter;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Sleep;

/// What one listener takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Its name in the metrics.
    pub(crate) listener: &'static str,
    /// Connections that have not authenticated, of all sources.
    pub(crate) unauthenticated_max: usize,
    /// The same, of one source.
    pub(crate) unauthenticated_per_source_max: usize,
    /// Connections that have authenticated.
    pub(crate) authenticated_max: usize,
    /// Deadline for authentication, from the accept.
    pub(crate) authenticate_within: Duration,
}

/// A connection that is counted for as long as it is open.
pub(crate) type Limited = Connection<TcpStream, Counted>;

/// What it is counted as, and until when it must have authenticated.
pub(crate) struct Counted {
    peer: SocketAddr,
    slot: Arc<Slot>,
    /// None once it has authenticated.
    deadline: Option<Pin<Box<Sleep>>>,
    _permit: ConnectionPermit,
}

/// What a connection is counted as.
pub(crate) struct Slot {
    /// Changed with the table locked, read without.
    phase: AtomicU8,
    /// Wakes the task that reads the connection when it is closed to make room.
    waiting: AtomicWaker,
    /// In the order of accepting.
    number: u64,
    source: Source,
    connections: Arc<Connections>,
}

/// There are too many authenticated connections already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitReached {
    pub(crate) authenticated_max: usize,
}

/// The connections of one listener.
struct Connections {
    limits: ConnectionLimits,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    accepted: u64,
    authenticated: usize,
    unauthenticated: usize,
    /// The unauthenticated ones, by number; no source is empty.
    by_source: HashMap<Source, BTreeMap<u64, Arc<Slot>>>,
}

const UNAUTHENTICATED: u8 = 0;
const AUTHENTICATED: u8 = 1;
/// Closed by us, or by its client.
const CLOSED: u8 = 2;

/// Connections as they are accepted. Never ends.
pub(crate) fn accept(
    listener: TcpListener,
    limits: ConnectionLimits,
) -> impl Stream<Item = Limited> + Send {
    let connections = Arc::new(Connections {
        limits,
        table: Mutex::default(),
    });
    ConnectionLimit::new(limits.open_max())
        .incoming(listener)
        .filter_map(move |(stream, permit)| {
            // A client that is gone already has no address.
            let peer = stream.peer_addr().ok();
            let limited = peer.map(|peer| Limited::new(stream, peer, permit, &connections));
            std::future::ready(limited)
        })
}

// === impl ConnectionLimits ===

impl ConnectionLimits {
    /// Sockets that are open: those that count, and as many that were closed and whose tasks have not noticed yet.
    pub(crate) fn open_max(self) -> usize {
        self.authenticated_max + 2 * self.unauthenticated_max
    }
}

// === impl Limited ===

impl Limited {
    fn new(
        stream: TcpStream,
        peer: SocketAddr,
        permit: ConnectionPermit,
        connections: &Arc<Connections>,
    ) -> Self {
        let within = connections.limits.authenticate_within;
        let attached = Counted {
            peer,
            slot: connections.enter(Source::of(peer.ip())),
            deadline: Some(Box::pin(tokio::time::sleep(within))),
            _permit: permit,
        };
        Self { stream, attached }
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.attached.peer
    }

    pub(crate) fn slot(&self) -> &Arc<Slot> {
        &self.attached.slot
    }
}

// === impl Counted ===

impl Attached for Counted {
    /// An error when it was closed to make room, or has not authenticated in time.
    fn check_open(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(deadline) = &mut self.deadline else {
            return Ok(());
        };
        // Before the phase is read: a change after that wakes us.
        self.slot.waiting.register(context.waker());
        match self.slot.phase.load(Ordering::Acquire) {
            UNAUTHENTICATED if deadline.as_mut().poll(context).is_pending() => Ok(()),
            UNAUTHENTICATED => Err(io::ErrorKind::TimedOut.into()),
            AUTHENTICATED => {
                self.deadline = None;
                Ok(())
            }
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.slot.leave();
    }
}

// === impl Slot ===

impl Slot {
    /// From now on it counts as authenticated. Nothing changes if it does already, or is closed.
    pub(crate) fn authenticate(&self) -> Result<(), LimitReached> {
        if self.phase.load(Ordering::Acquire) != UNAUTHENTICATED {
            return Ok(());
        }
        let authenticated_max = self.connections.limits.authenticated_max;
        let mut table = self.connections.table();
        if self.phase.load(Ordering::Acquire) != UNAUTHENTICATED {
            return Ok(());
        }
        if table.authenticated >= authenticated_max {
            return Err(LimitReached { authenticated_max });
        }
        table.remove(self);
        table.authenticated += 1;
        self.phase.store(AUTHENTICATED, Ordering::Release);
        Ok(())
    }

    /// Whether it counts as authenticated.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.phase.load(Ordering::Acquire) == AUTHENTICATED
    }

    /// Its connection is gone.
    fn leave(&self) {
        let mut table = self.connections.table();
        match self.phase.swap(CLOSED, Ordering::AcqRel) {
            UNAUTHENTICATED => table.remove(self),
            AUTHENTICATED => table.authenticated -= 1,
            _ => {}
        }
    }
}

impl fmt::Debug for Slot {
    /// Without the others of its listener.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, source, .. } = self;
        write!(f, "Slot({number}, {source:?})")
    }
}

// === impl Connections ===

impl Connections {
    /// A slot for a new connection. Another may have lost its own for that.
    fn enter(self: &Arc<Self>, source: Source) -> Arc<Slot> {
        let limits = &self.limits;
        let mut table = self.table();
        let of_source = table.by_source.get(&source).map_or(0, BTreeMap::len);
        if of_source >= limits.unauthenticated_per_source_max {
            self.close_oldest(&mut table, source);
        } else if table.unauthenticated >= limits.unauthenticated_max
            && let Some(source) = table.largest_source()
        {
            self.close_oldest(&mut table, source);
        }
        table.accepted += 1;
        let slot = Arc::new(Slot {
            phase: AtomicU8::new(UNAUTHENTICATED),
            waiting: AtomicWaker::new(),
            number: table.accepted,
            source,
            connections: Arc::clone(self),
        });
        table.unauthenticated += 1;
        let of_source = table.by_source.entry(source).or_default();
        of_source.insert(slot.number, Arc::clone(&slot));
        slot
    }

    fn close_oldest(&self, table: &mut Table, source: Source) {
        let of_source = table.by_source.get(&source);
        let oldest = of_source.and_then(|slots| slots.values().next()).cloned();
        if let Some(slot) = oldest {
            table.remove(&slot);
            slot.phase.store(CLOSED, Ordering::Release);
            slot.waiting.wake();
            counter!(CONNECTIONS_CLOSED, "listener" => self.limits.listener).increment(1);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Table ===

impl Table {
    /// The source with the most unauthenticated connections; of several, the one with the oldest.
    fn largest_source(&self) -> Option<Source> {
        let rank = |slots: &BTreeMap<u64, _>| (slots.len(), Reverse(slots.keys().next().copied()));
        let largest = self.by_source.iter().max_by_key(|(_, slots)| rank(slots));
        largest.map(|(source, _)| *source)
    }

    fn remove(&mut self, slot: &Slot) {
        let Some(of_source) = self.by_source.get_mut(&slot.source) else {
            return;
        };
        if of_source.remove(&slot.number).is_some() {
            self.unauthenticated -= 1;
        }
        if of_source.is_empty() {
            self.by_source.remove(&slot.source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpSocket;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        listener: "test",
        unauthenticated_max: 6,
        unauthenticated_per_source_max: 4,
        authenticated_max: 2,
        authenticate_within: Duration::from_secs(30),
    };

    fn connections() -> Arc<Connections> {
        Arc::new(Connections {
            limits: LIMITS,
            table: Mutex::default(),
        })
    }

    fn source(n: u8) -> Source {
        Source::of([192, 0, 2, n].into())
    }

    fn is_open(slot: &Arc<Slot>) -> bool {
        slot.phase.load(Ordering::Acquire) == UNAUTHENTICATED
    }

    #[test]
    fn a_source_has_its_share_and_its_oldest_makes_room() {
        let connections = connections();
        let slots: Vec<_> = (0..10).map(|_| connections.enter(source(1))).collect();
        let open: Vec<_> = slots.iter().map(is_open).collect();
        assert_eq!(open.iter().filter(|open| **open).count(), 4);
        assert!(open[6..].iter().all(|open| *open), "{open:?}");
        assert_eq!(connections.table().unauthenticated, 4);
    }

    #[test]
    fn when_all_is_full_the_source_that_has_most_makes_room() {
        let connections = connections();
        let many: Vec<_> = (0..4).map(|_| connections.enter(source(1))).collect();
        let few: Vec<_> = (0..2).map(|_| connections.enter(source(2))).collect();
        let new = connections.enter(source(3));
        assert!(is_open(&new) && few.iter().all(is_open));
        assert!(!is_open(&many[0]) && many[1..].iter().all(is_open));
        // One for each of many sources: the oldest of all.
        let spread: Vec<_> = (4..40).map(|n| connections.enter(source(n))).collect();
        assert!(spread[30..].iter().all(is_open));
        assert_eq!(connections.table().unauthenticated, 6);
        assert_eq!(connections.table().by_source.len(), 6);
    }

    #[test]
    fn an_authenticated_connection_gives_its_slot_back_and_cannot_be_closed() {
        let connections = connections();
        let known = connections.enter(source(1));
        known.authenticate().unwrap();
        known.authenticate().unwrap();
        let silent: Vec<_> = (0..10).map(|_| connections.enter(source(1))).collect();
        assert_eq!(known.phase.load(Ordering::Acquire), AUTHENTICATED);
        let open: Vec<_> = silent.iter().filter(|slot| is_open(slot)).collect();
        open[0].authenticate().unwrap();
        let authenticated_max = LIMITS.authenticated_max;
        assert_eq!(
            open[1].authenticate(),
            Err(LimitReached { authenticated_max })
        );
        known.leave();
        open[1].authenticate().unwrap();
        // One that was closed meanwhile is not counted again.
        silent[0].authenticate().unwrap();
        for slot in silent.iter().chain([&known]) {
            slot.leave();
            slot.leave();
        }
        let table = connections.table();
        assert_eq!((table.authenticated, table.unauthenticated), (0, 0));
        assert!(table.by_source.is_empty());
    }

    async fn connect(listener: SocketAddr, from: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket
            .bind(SocketAddr::new(from.parse().unwrap(), 0))
            .unwrap();
        socket.connect(listener).await.unwrap()
    }

    #[tokio::test]
    async fn a_connection_that_made_room_is_closed_while_it_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepted = std::pin::pin!(accept(listener, LIMITS));
        let mut clients = vec![connect(address, "127.0.0.2").await];
        let mut first = accepted.next().await.unwrap();
        assert_eq!(first.peer().ip().to_string(), "127.0.0.2");
        let reading = tokio::spawn(async move { first.read_u8().await.unwrap_err().kind() });
        tokio::task::yield_now().await;
        let mut held = Vec::new();
        for _ in 0..LIMITS.unauthenticated_per_source_max {
            clients.push(connect(address, "127.0.0.2").await);
            held.push(accepted.next().await.unwrap());
        }
        assert_eq!(reading.await.unwrap(), io::ErrorKind::ConnectionAborted);
        drop(held);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_authenticate_in_time_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut accepted = std::pin::pin!(accept(listener, LIMITS));
        let _silent = connect(address, "127.0.0.1").await;
        let mut late = accepted.next().await.unwrap();
        let kind = late.read_u8().await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::TimedOut);
        drop(late);
        let mut client = connect(address, "127.0.0.1").await;
        let mut known = accepted.next().await.unwrap();
        known.slot().authenticate().unwrap();
        let waited = tokio::time::timeout(2 * LIMITS.authenticate_within, known.read_u8()).await;
        assert!(waited.is_err(), "an authenticated connection may be silent");
        tokio::io::AsyncWriteExt::write_u8(&mut client, 7)
            .await
            .unwrap();
        assert_eq!(known.read_u8().await.unwrap(), 7);
    }
}
