//! The DNS server of a sandbox over real sockets, with an upstream on loopback.

mod limits;

use super::test_upstream::{Act, Upstream, a, cname, many, question};
use super::{Resolver, serve_tcp, serve_udp};
use crate::fd_budget::Budget;
use crate::sandbox_net::{Limits, Policy, SandboxNet};
use hickory_proto::op::{Edns, Message, ResponseCode};
use hickory_proto::rr::RecordType;
use k8e_model::egress::{DenyList, DenyReason, EgressPolicy, Flow, FlowProtocol, HostName};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Deadline of everything in these tests.
const PATIENCE: Duration = Duration::from_secs(10);

/// The DNS server of a sandbox on loopback, and a client socket.
struct Served {
    sandbox: Arc<SandboxNet>,
    client: UdpSocket,
    tcp: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Served {
    async fn start(upstream: &Upstream, allow: &[&str], deny: &[&str]) -> Self {
        let resolver = Arc::new(Resolver::new(vec![upstream.address]));
        let limits = Limits {
            connections: 8,
            bandwidth: None,
        };
        let sandbox = Arc::new(SandboxNet::new(resolver, limits, Arc::new(Budget::new(64))));
        sandbox.set_policy(policy(allow, deny));
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = listener.local_addr().unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(udp.local_addr().unwrap()).await.unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(Arc::clone(&sandbox), udp));
        tasks.spawn(serve_tcp(Arc::clone(&sandbox), listener));
        Self {
            sandbox,
            client,
            tcp,
            _tasks: tasks,
        }
    }

    async fn send(&self, message: &Message) {
        self.client.send(&message.to_vec().unwrap()).await.unwrap();
    }

    async fn receive(&self) -> Message {
        let mut buffer = [0; 4096];
        let received = timeout(PATIENCE, self.client.recv(&mut buffer)).await;
        let length = received.expect("a reply in time").unwrap();
        Message::from_vec(&buffer[..length]).unwrap()
    }

    async fn ask(&self, name: &str, kind: RecordType) -> Message {
        self.send(&question(7, name, kind)).await;
        let reply = self.receive().await;
        assert_eq!(reply.id, 7);
        reply
    }

    /// Response code, and the records without their TTLs.
    async fn ask_a(&self, name: &str) -> (ResponseCode, Vec<String>) {
        let reply = self.ask(name, RecordType::A).await;
        let records = reply.answers.iter();
        let records = records.map(|one| format!("{} {}", one.name, one.data));
        (reply.response_code, records.collect())
    }

    async fn flows(&self) -> Vec<Flow> {
        let mut stream = self.sandbox.flow_log().read(false);
        let mut flows = Vec::new();
        while let Some(flow) = stream.next().await {
            assert_eq!(flow.protocol, FlowProtocol::Dns);
            flows.push(flow);
        }
        flows
    }

    /// Names and reasons of the denied flows.
    async fn denied(&self) -> Vec<(String, DenyReason)> {
        let flows = self.flows().await.into_iter();
        let named = flows.map(|flow| (flow.name.unwrap_or_default(), flow.reason.unwrap()));
        named.collect()
    }

    fn has(&self, name: &str, address: &str) -> bool {
        let name = HostName::parse(name).unwrap();
        self.sandbox
            .sent_replies()
            .contains(&name, address.parse().unwrap())
    }
}

fn policy(allow: &[&str], deny: &[&str]) -> Policy {
    Policy {
        allow: EgressPolicy::parse(allow).unwrap(),
        deny: DenyList::parse(deny).unwrap(),
        session: "sess-a".to_owned(),
    }
}

fn framed(message: &Message) -> Vec<u8> {
    let bytes = message.to_vec().unwrap();
    let length = u16::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes()[..], &bytes].concat()
}

async fn ask_tcp(stream: &mut TcpStream, message: &Message) -> Message {
    stream.write_all(&framed(message)).await.unwrap();
    let length = timeout(PATIENCE, stream.read_u16()).await.unwrap().unwrap();
    let mut reply = vec![0; usize::from(length)];
    stream.read_exact(&mut reply).await.unwrap();
    Message::from_vec(&reply).unwrap()
}

/// Whether the server closes the connection without sending anything.
async fn closes(stream: &mut TcpStream) -> bool {
    let read = timeout(PATIENCE, stream.read_u8()).await;
    read.expect("an end in time").is_err()
}

fn refused() -> (ResponseCode, Vec<String>) {
    (ResponseCode::Refused, Vec::new())
}

#[tokio::test]
async fn an_allowed_name_is_resolved_and_recorded() {
    let upstream = Upstream::with(vec![
        cname("a.example", 3600, "cdn.example"),
        a("cdn.example", 3600, "8.8.8.8"),
    ])
    .await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let reply = served.ask("A.Example.", RecordType::A).await;
    assert!(served.has("a.example", "8.8.8.8"), "before the reply");
    assert!(
        !served.has("cdn.example", "8.8.8.8"),
        "nobody asked for that"
    );
    assert!(reply.answers.iter().all(|record| record.ttl == 60));
    let told = ["A.Example. cdn.example.", "cdn.example. 8.8.8.8"].map(str::to_owned);
    assert_eq!(
        served.ask_a("A.Example.").await,
        (ResponseCode::NoError, told.to_vec())
    );
    assert_eq!(upstream.names(), ["a.example."]);
    assert!(served.flows().await.is_empty());
}

#[tokio::test]
async fn other_names_are_refused_without_an_upstream_query() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["a.example", "*.b.example"], &["x.b.example"]).await;
    let names = [
        "other.example.",
        "secret.a.example.",
        "b.example.",
        "x.b.example.",
        "localhost.",
    ];
    for name in names
        .into_iter()
        .chain(["intranet.", ".", "a\\.b.example.", "1.2.3.4."])
    {
        for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT] {
            let reply = served.ask(name, kind).await;
            assert_eq!(reply.response_code, ResponseCode::Refused, "{name}");
        }
    }
    let pointer = served.ask("8.8.8.8.in-addr.arpa.", RecordType::PTR).await;
    assert_eq!(pointer.response_code, ResponseCode::Refused);
    assert!(upstream.asked().is_empty());
    let flows = served.flows().await;
    assert_eq!(flows.len(), 10);
    assert_eq!(flows[0].name.as_deref(), Some("other.example"));
    assert_eq!(
        (flows[0].reason, flows[0].count),
        (Some(DenyReason::NotAllowed), 3)
    );
    assert_eq!(flows[3].reason, Some(DenyReason::DenyList));
    assert_eq!(flows[3].rule.as_deref(), Some("x.b.example"));
}

#[tokio::test]
async fn other_record_types_are_empty_without_an_upstream_query() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let kinds = [
        RecordType::AAAA,
        RecordType::HTTPS,
        RecordType::SVCB,
        RecordType::TXT,
        RecordType::MX,
        RecordType::ANY,
        RecordType::CNAME,
        RecordType::Unknown(65_280),
    ];
    for kind in kinds {
        let reply = served.ask("a.example.", kind).await;
        assert_eq!(reply.response_code, ResponseCode::NoError, "{kind}");
        assert!(reply.answers.is_empty() && reply.queries[0].query_type() == kind);
    }
    assert!(upstream.asked().is_empty() && served.flows().await.is_empty());
}

#[tokio::test]
async fn a_denied_cname_denies_the_name() {
    let upstream = Upstream::with(vec![
        cname("a.example", 60, "x.bad.example"),
        cname("x.bad.example", 60, "cdn.example"),
        a("cdn.example", 60, "8.8.8.8"),
    ])
    .await;
    let served = Served::start(&upstream, &["a.example"], &["*.bad.example"]).await;
    assert_eq!(served.ask_a("a.example.").await, refused());
    assert_eq!(
        served.denied().await,
        [("a.example".into(), DenyReason::DenyList)]
    );
    assert!(!served.has("a.example", "8.8.8.8"));
}

#[tokio::test]
async fn private_addresses_are_removed_unless_a_rule_covers_them() {
    let inside = [
        "127.0.0.1",
        "169.254.169.254",
        "10.1.2.3",
        "198.18.0.1",
        "8.8.8.8",
    ];
    let records = inside.map(|address| a("a.example", 60, address));
    let upstream = Upstream::with(records.to_vec()).await;
    for (allow, told) in [
        (&["a.example"][..], &["8.8.8.8"][..]),
        (&["a.example", "10.1.0.0/16:22"], &["10.1.2.3", "8.8.8.8"]),
        (&["all"], &["8.8.8.8"]),
    ] {
        let served = Served::start(&upstream, allow, &[]).await;
        let told: Vec<String> = told.iter().map(|one| format!("a.example. {one}")).collect();
        assert_eq!(
            served.ask_a("a.example.").await,
            (ResponseCode::NoError, told)
        );
        assert!(!served.has("a.example", "127.0.0.1"));
    }
}

#[tokio::test]
async fn dns_rebinding_to_a_private_address_is_denied() {
    let upstream = Upstream::start(|asked| {
        let address = ["8.8.8.8", "127.0.0.1", "10.0.0.1"][asked.number];
        vec![asked.records(vec![a("a.example", 0, address)])]
    })
    .await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    assert_eq!(served.ask_a("a.example.").await.1, ["a.example. 8.8.8.8"]);
    // A TTL of 0 is raised to the minimum: within it, a rebinding attack gets the first reply again.
    assert_eq!(served.ask_a("a.example.").await.1, ["a.example. 8.8.8.8"]);
    for reason in [DenyReason::ThisMachine, DenyReason::PrivateAddress] {
        tokio::time::pause();
        tokio::time::advance(super::resolver::TTL_MIN).await;
        tokio::time::resume();
        assert_eq!(served.ask_a("a.example.").await, refused());
        let last = served.flows().await.pop().unwrap();
        assert_eq!(last.reason, Some(reason));
        assert!(last.address.is_some());
    }
    assert!(served.has("a.example", "8.8.8.8") && !served.has("a.example", "127.0.0.1"));
}

#[tokio::test]
async fn a_policy_change_during_a_lookup_counts() {
    let upstream = Upstream::start(|asked| {
        let records = vec![a("a.example", 60, "8.8.8.8")];
        vec![
            Act::Wait(Duration::from_millis(200)),
            asked.records(records),
        ]
    })
    .await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    served.send(&question(7, "a.example.", RecordType::A)).await;
    while upstream.asked().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    served.sandbox.set_policy(policy(&["none"], &[]));
    assert_eq!(served.receive().await.response_code, ResponseCode::Refused);
    assert!(!served.has("a.example", "8.8.8.8"));
}

#[tokio::test]
async fn a_change_of_the_deny_list_clears_sent_replies() {
    let upstream = Upstream::with(vec![
        cname("a.example", 60, "x.bad.example"),
        a("x.bad.example", 60, "8.8.8.8"),
    ])
    .await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    assert_eq!(served.ask_a("a.example.").await.1.len(), 2);
    served
        .sandbox
        .set_policy(policy(&["a.example", "b.example"], &[]));
    assert!(served.has("a.example", "8.8.8.8"));
    served
        .sandbox
        .set_policy(policy(&["a.example"], &["*.bad.example"]));
    assert!(!served.has("a.example", "8.8.8.8"));
    assert_eq!(served.ask_a("a.example.").await, refused());
}

#[tokio::test]
async fn upstream_errors_are_returned() {
    let upstream = Upstream::start(|asked| match asked.name.as_str() {
        "no.example." => vec![asked.code(ResponseCode::NXDomain)],
        "bad.example." => vec![asked.code(ResponseCode::ServFail)],
        _ => vec![asked.records(Vec::new())],
    })
    .await;
    let served = Served::start(&upstream, &["*.example"], &[]).await;
    for (name, code) in [
        ("no.example.", ResponseCode::NXDomain),
        ("bad.example.", ResponseCode::ServFail),
        ("empty.example.", ResponseCode::NoError),
    ] {
        assert_eq!(served.ask_a(name).await, (code, Vec::new()));
    }
    let denied = served.denied().await;
    assert!(
        denied
            .iter()
            .all(|(_, reason)| *reason == DenyReason::Unresolved)
    );
    assert_eq!(denied.len(), 3);
}

#[tokio::test]
async fn a_long_reply_is_truncated_over_udp_unless_edns_allows_it() {
    let upstream = Upstream::start(|asked| match asked.tcp {
        false => vec![asked.truncated()],
        true => vec![asked.records(many("a.example", 500))],
    })
    .await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let short = served.ask("a.example.", RecordType::A).await;
    assert!(short.truncation && (20..32).contains(&short.answers.len()));
    let mut with_edns = question(7, "a.example.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(1232);
    with_edns.set_edns(edns);
    served.send(&with_edns).await;
    let long = served.receive().await;
    assert!(!long.truncation && long.answers.len() == 32 && long.edns.is_some());
    let mut stream = TcpStream::connect(served.tcp).await.unwrap();
    let full = ask_tcp(&mut stream, &question(8, "a.example.", RecordType::A)).await;
    assert!(!full.truncation && full.answers.len() == 32 && full.id == 8);
    let last = Ipv4Addr::new(8, 8, 0, 31).to_string();
    assert!(served.has("a.example", &last));
}
