//! Test support: a gate on loopback in front of a server on loopback, and TLS ClientHellos.

use super::{Dialer, serve_in};
use crate::dns::Resolver;
use crate::fd_budget::Budget;
use crate::sandbox_net::{Limits, Policy, SandboxNet};
use hickory_proto::op::Message;
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record};
use k8e_model::egress::{DenyList, EgressPolicy, Flow, HostName};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Deadline of everything in a test.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// A gate for tests: every connection to it has the original destination `to`, and the upstream
/// connection goes to a server of the test.
pub(super) struct Stage {
    pub(super) sandbox: Arc<SandboxNet>,
    pub(super) gate: SocketAddr,
    _tasks: JoinSet<()>,
}

pub(super) fn name(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

pub(super) fn policy(allow: &[&str], deny: &[&str]) -> Policy {
    Policy {
        allow: EgressPolicy::parse(allow).unwrap(),
        deny: DenyList::parse(deny).unwrap(),
        session: "sess-a".to_owned(),
    }
}

/// Network state without upstream resolvers.
pub(super) fn sandbox(policy: Policy, limits: Limits) -> Arc<SandboxNet> {
    sandbox_with(policy, limits, Vec::new())
}

pub(super) fn sandbox_with(
    policy: Policy,
    limits: Limits,
    resolvers: Vec<SocketAddr>,
) -> Arc<SandboxNet> {
    let resolver = Arc::new(Resolver::new(resolvers));
    let sandbox = SandboxNet::new(resolver, limits, Arc::new(Budget::new(1024)));
    sandbox.set_policy(policy);
    Arc::new(sandbox)
}

/// An upstream resolver that replies to every query with these records.
pub(super) async fn resolver(records: Vec<Record>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        loop {
            let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
            let mut reply = Message::from_vec(&buffer[..length])
                .unwrap()
                .into_response();
            reply.metadata.recursion_available = true;
            reply.add_answers(records.clone());
            socket
                .send_to(&reply.to_vec().unwrap(), from)
                .await
                .unwrap();
        }
    });
    address
}

pub(super) fn a_record(owner: &str, address: &str) -> Record {
    let data = RData::A(A(address.parse().unwrap()));
    Record::from_rdata(Name::from_ascii(format!("{owner}.")).unwrap(), 60, data)
}

pub(super) fn alias(owner: &str, target: &str) -> Record {
    let data = RData::CNAME(CNAME(Name::from_ascii(format!("{target}.")).unwrap()));
    Record::from_rdata(Name::from_ascii(format!("{owner}.")).unwrap(), 60, data)
}

pub(super) const LIMITS: Limits = Limits {
    connections: 64,
    bandwidth: None,
};

// === impl Stage ===

impl Stage {
    pub(super) async fn open(policy: Policy, to: &str, server: SocketAddr) -> Self {
        Self::with_limits(policy, LIMITS, to, server).await
    }

    pub(super) async fn with_limits(
        policy: Policy,
        limits: Limits,
        to: &str,
        server: SocketAddr,
    ) -> Self {
        Self::of(sandbox(policy, limits), to, server).await
    }

    /// A gate that allows everything, with a file descriptor budget shared with others.
    pub(super) async fn sharing(
        budget: &Arc<Budget>,
        limits: Limits,
        to: &str,
        server: SocketAddr,
    ) -> Self {
        let resolver = Arc::new(Resolver::new(Vec::new()));
        let sandbox = SandboxNet::new(resolver, limits, Arc::clone(budget));
        sandbox.set_policy(policy(&["all"], &[]));
        Self::of(Arc::new(sandbox), to, server).await
    }

    async fn of(sandbox: Arc<SandboxNet>, to: &str, server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let gate = listener.local_addr().unwrap();
        let to = to.parse().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_in(
            Dialer::Test { to, server },
            Arc::clone(&sandbox),
            listener,
        ));
        Self {
            sandbox,
            gate,
            _tasks: tasks,
        }
    }

    /// Records a DNS reply as if it had been sent to the sandbox.
    pub(super) fn tell(&self, host: &str, address: &str) {
        let addresses = [address.parse().unwrap()];
        self.sandbox
            .sent_replies()
            .record(&name(host), &addresses, SOON);
    }

    pub(super) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.gate).await.unwrap()
    }

    /// Connects, sends the bytes, and returns all that is received.
    pub(super) async fn say(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await?;
        read_all(&mut stream).await
    }

    /// The flow log, once it has `count` entries.
    pub(super) async fn flows(&self, count: usize) -> Vec<Flow> {
        let wait = async {
            loop {
                let mut stream = self.sandbox.flow_log().read(false);
                let mut flows = Vec::new();
                while let Some(flow) = stream.next().await {
                    flows.push(flow);
                }
                if flows.len() >= count {
                    return flows;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, wait)
            .await
            .expect("the flow log has the entries before the deadline")
    }

    /// The only entry of the flow log, as text.
    pub(super) async fn flow(&self) -> String {
        let flows = self.flows(1).await;
        assert_eq!(flows.len(), 1, "{flows:?}");
        text(&flows[0])
    }
}

/// Verdict or reason, name, address and rule.
pub(super) fn text(flow: &Flow) -> String {
    let verdict = flow
        .reason
        .map_or(flow.verdict.as_str(), |reason| reason.as_str());
    let name = flow.name.as_deref().unwrap_or("-");
    let rule = flow.rule.as_deref().unwrap_or("-");
    let (address, port) = (flow.address.unwrap(), flow.port.unwrap());
    format!("{verdict} {name} {address}:{port} {rule}")
}

pub(super) async fn read_all(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    timeout(SOON, stream.read_to_end(&mut bytes))
        .await
        .expect("EOF before the deadline")?;
    Ok(bytes)
}

pub(super) fn is_reset<T>(result: &io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::ConnectionReset)
}

/// Runs `serve` for each connection.
pub(super) async fn server<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(stream));
        }
    });
    address
}

/// An echo server.
pub(super) async fn echo() -> SocketAddr {
    server(|mut stream| async move {
        let (mut read, mut write) = stream.split();
        tokio::io::copy(&mut read, &mut write).await?;
        write.shutdown().await
    })
    .await
}

/// An address on which nothing listens: an allowed connection is logged as unreachable, not as denied.
pub(super) async fn nobody() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

/// A ClientHello as rustls sends it.
pub(super) fn hello(name: &str) -> Vec<u8> {
    hello_with(name, |_| {})
}

pub(super) fn hello_with(name: &str, change: impl FnOnce(&mut ClientConfig)) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    change(&mut config);
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut bytes).unwrap();
    }
    bytes
}

/// A ClientHello with exactly these extensions, in one record.
pub(super) fn hello_of(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, data) in extensions {
        list.extend(kind.to_be_bytes());
        list.extend(vector(data));
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 0x01, 1, 0]); // no session, one suite, no compression
    body.extend(vector(&list));
    record(&message(&body))
}

pub(super) fn sni(name: &[u8]) -> (u16, Vec<u8>) {
    let mut entry = vec![0];
    entry.extend(vector(name));
    (0, vector(&entry))
}

/// A ClientHello as a handshake message.
pub(super) fn message(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let mut message = vec![1];
    message.extend(&length[1..]);
    message.extend(body);
    message
}

pub(super) fn record(payload: &[u8]) -> Vec<u8> {
    let mut record = vec![22, 3, 1];
    record.extend(vector(payload));
    record
}

pub(super) fn vector(bytes: &[u8]) -> Vec<u8> {
    let mut vector = u16::try_from(bytes.len()).unwrap().to_be_bytes().to_vec();
    vector.extend(bytes);
    vector
}
