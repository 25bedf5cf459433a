//! A scripted upstream resolver on loopback, over UDP and TCP, for tests.

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

/// A query as it arrived.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// The queried name, in the case it was sent.
    pub(super) name: String,
    pub(super) message: Message,
    pub(super) from: SocketAddr,
    pub(super) tcp: bool,
    /// Number of queries that arrived before.
    pub(super) number: usize,
}

/// One step of the response to a query.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Send(Vec<u8>),
    /// Sends from another port than the query went to.
    SendFromElsewhere(Vec<u8>),
    Wait(Duration),
}

type Script = dyn Fn(&Asked) -> Vec<Act> + Send + Sync;

/// The running upstream. Dropping it stops it.
pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    _tasks: JoinSet<()>,
}

// === impl Upstream ===

impl Upstream {
    pub(super) async fn start(script: impl Fn(&Asked) -> Vec<Act> + Send + Sync + 'static) -> Self {
        let (udp, tcp) = same_port().await;
        let address = udp.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let script: Arc<Script> = Arc::new(script);
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(udp, Arc::clone(&script), Arc::clone(&asked)));
        tasks.spawn(serve_tcp(tcp, script, Arc::clone(&asked)));
        Self {
            address,
            asked,
            _tasks: tasks,
        }
    }

    /// An upstream that replies to every query with the same records.
    pub(super) async fn with(records: Vec<Record>) -> Self {
        Self::start(move |asked| vec![asked.records(records.clone())]).await
    }

    /// An upstream that never replies.
    pub(super) async fn silent() -> Self {
        Self::start(|_| Vec::new()).await
    }

    pub(super) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// The names that were queried.
    pub(super) fn names(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.name).collect()
    }
}

// === impl Asked ===

impl Asked {
    pub(super) fn reply(&self) -> Message {
        let mut reply = self.message.clone().into_response();
        reply.metadata.recursion_available = true;
        reply
    }

    pub(super) fn records(&self, records: Vec<Record>) -> Act {
        let mut reply = self.reply();
        reply.add_answers(records);
        Act::Send(reply.to_vec().unwrap())
    }

    pub(super) fn code(&self, code: ResponseCode) -> Act {
        let mut reply = self.reply();
        reply.metadata.response_code = code;
        Act::Send(reply.to_vec().unwrap())
    }

    pub(super) fn truncated(&self) -> Act {
        let mut reply = self.reply();
        reply.metadata.truncation = true;
        Act::Send(reply.to_vec().unwrap())
    }
}

pub(super) fn a(owner: &str, ttl: u32, address: &str) -> Record {
    let data = RData::A(A(address.parse().unwrap()));
    Record::from_rdata(Name::from_ascii(format!("{owner}.")).unwrap(), ttl, data)
}

pub(super) fn cname(owner: &str, ttl: u32, target: &str) -> Record {
    let data = RData::CNAME(CNAME(Name::from_ascii(format!("{target}.")).unwrap()));
    Record::from_rdata(Name::from_ascii(format!("{owner}.")).unwrap(), ttl, data)
}

/// A records with `count` different public addresses.
pub(super) fn many(owner: &str, count: u32) -> Vec<Record> {
    let address = |number| Ipv4Addr::from_bits(0x0808_0000 + number).to_string();
    (0..count).map(|n| a(owner, 60, &address(n))).collect()
}

/// A query as a client sends it.
pub(super) fn question(id: u16, name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

/// A port on which nothing listens.
pub(super) async fn closed_port() -> SocketAddr {
    let (udp, _tcp) = same_port().await;
    udp.local_addr().unwrap()
}

async fn same_port() -> (UdpSocket, TcpListener) {
    for _ in 0..100 {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            return (udp, tcp);
        }
    }
    panic!("no port is free for UDP and TCP");
}

fn heard(bytes: &[u8], from: SocketAddr, tcp: bool, log: &Mutex<Vec<Asked>>) -> Asked {
    let message = Message::from_vec(bytes).expect("the resolver asks valid questions");
    let mut log = log.lock().unwrap();
    let asked = Asked {
        name: message.queries[0].name().to_ascii(),
        message,
        from,
        tcp,
        number: log.len(),
    };
    log.push(asked.clone());
    asked
}

async fn serve_udp(socket: UdpSocket, script: Arc<Script>, log: Arc<Mutex<Vec<Asked>>>) {
    let socket = Arc::new(socket);
    let mut acting = JoinSet::new();
    let mut buffer = [0; 4096];
    loop {
        // An error is about a reply to a socket that is closed.
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        let acts = script(&heard(&buffer[..length], from, false, &log));
        let socket = Arc::clone(&socket);
        acting.spawn(async move {
            for act in acts {
                match act {
                    Act::Send(bytes) => drop(socket.send_to(&bytes, from).await),
                    Act::SendFromElsewhere(bytes) => {
                        let other = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                        other.send_to(&bytes, from).await.unwrap();
                    }
                    Act::Wait(time) => tokio::time::sleep(time).await,
                }
            }
        });
    }
}

async fn serve_tcp(listener: TcpListener, script: Arc<Script>, log: Arc<Mutex<Vec<Asked>>>) {
    loop {
        let (mut stream, from) = listener.accept().await.unwrap();
        let Ok(length) = stream.read_u16().await else {
            continue;
        };
        let mut bytes = vec![0; usize::from(length)];
        stream.read_exact(&mut bytes).await.unwrap();
        for act in script(&heard(&bytes, from, true, &log)) {
            match act {
                Act::Send(bytes) | Act::SendFromElsewhere(bytes) => {
                    let length = u16::try_from(bytes.len()).unwrap();
                    let _ = stream.write_u16(length).await;
                    let _ = stream.write_all(&bytes).await;
                }
                Act::Wait(time) => tokio::time::sleep(time).await,
            }
        }
    }
}
