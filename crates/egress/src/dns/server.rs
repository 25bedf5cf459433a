//! DNS server of a sandbox, over UDP and TCP.

use super::SENT_REPLY_LIFETIME;
use super::lookup::{Denied, lookup, may_resolve};
use super::message::{BadQuery, HEADER_BYTES, QUERY_BYTES_MAX, Query, Transport};
use super::query_limits::NOTED_EVERY;
use crate::sandbox_net::{Policy, SandboxNet};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict, HostName};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Idle timeout of a TCP connection: from one query to the end of the next, and for the client to
/// read a reply.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause after a socket error, which would repeat at once, and when queries are over the rate limit:
/// it bounds the CPU time of a flood, since the kernel drops the rest.
const PAUSE: Duration = Duration::from_millis(50);

/// Queries over UDP that are dropped between two pauses.
const DROPPED_AT_ONCE: u32 = 64;

/// The next step for a query.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Drop it without a reply.
    Silence,
    /// Send this reply and add this flow to the log.
    Reply(Option<Vec<u8>>, Option<Flow>),
    /// Look up the addresses of the name.
    LookUp(Query, HostName),
}

/// Serves queries over UDP until the task is dropped.
///
/// Queries over a limit are dropped without a reply: clients retry by themselves, and a reply would
/// cost more than it helps.
pub(crate) async fn serve_udp(sandbox: Arc<SandboxNet>, socket: UdpSocket) {
    let socket = Arc::new(socket);
    let mut waiting = JoinSet::new();
    // One byte more than a query may have, so that a longer one is detected.
    let mut buffer = vec![0; QUERY_BYTES_MAX + 1];
    let mut dropped = 0_u32;
    loop {
        note_dropped(&sandbox);
        while waiting.try_join_next().is_some() {}
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            () = sleep(NOTED_EVERY), if sandbox.query_limits().has_dropped() => continue,
        };
        let Ok((length, from)) = received else {
            sleep(PAUSE).await;
            continue;
        };
        if !sandbox.query_limits().admit() {
            dropped += 1;
            if dropped >= DROPPED_AT_ONCE {
                dropped = 0;
                sleep(PAUSE).await;
            }
            continue;
        }
        match first_step(&sandbox.policy(), &buffer[..length], Transport::Udp) {
            Step::Silence => {}
            Step::Reply(reply, flow) => {
                note(&sandbox, flow);
                if let Some(reply) = reply {
                    // An error means that the client has closed its socket.
                    let _ = socket.send_to(&reply, from).await;
                }
            }
            Step::LookUp(query, host) => {
                let Some(place) = sandbox.query_limits().wait() else {
                    continue;
                };
                let (sandbox, socket) = (Arc::clone(&sandbox), Arc::clone(&socket));
                waiting.spawn(async move {
                    if let Some(reply) = find(&sandbox, &query, &host, Transport::Udp).await {
                        let _ = socket.send_to(&reply, from).await;
                    }
                    drop(place);
                });
            }
        }
    }
}

/// Serves queries over TCP until the task is dropped.
pub(crate) async fn serve_tcp(sandbox: Arc<SandboxNet>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        note_dropped(&sandbox);
        while connections.try_join_next().is_some() {}
        let stream = tokio::select! {
            stream = k8e_net::accept::accept(&listener) => stream,
            () = sleep(NOTED_EVERY), if sandbox.query_limits().has_dropped() => continue,
        };
        // A connection counts as a query, otherwise opening and closing them would have no limit.
        let admitted = sandbox.query_limits().admit();
        let place = admitted.then(|| {
            sandbox
                .query_limits()
                .connect()
                .zip(sandbox.dns_connection())
        });
        let Some(place) = place.flatten() else {
            drop(stream);
            sleep(PAUSE).await;
            continue;
        };
        let sandbox = Arc::clone(&sandbox);
        connections.spawn(async move {
            let _ended = serve_connection(&sandbox, stream).await;
            drop(place);
        });
    }
}

/// Serves the queries of one connection in turn. None, which closes it, at its end and on any error.
async fn serve_connection(sandbox: &SandboxNet, mut stream: TcpStream) -> Option<()> {
    loop {
        let bytes = timeout(IDLE_TIMEOUT, read_message(&mut stream))
            .await
            .ok()??;
        if !sandbox.query_limits().admit() {
            return None;
        }
        let reply = match first_step(&sandbox.policy(), &bytes, Transport::Tcp) {
            Step::Silence => return None,
            Step::Reply(reply, flow) => {
                note(sandbox, flow);
                reply
            }
            Step::LookUp(query, host) => {
                let place = sandbox.query_limits().wait()?;
                let reply = find(sandbox, &query, &host, Transport::Tcp).await;
                drop(place);
                reply
            }
        }?;
        let mut message = u16::try_from(reply.len()).ok()?.to_be_bytes().to_vec();
        message.extend_from_slice(&reply);
        let written = timeout(IDLE_TIMEOUT, stream.write_all(&message)).await;
        written.ok()?.ok()?;
    }
}

async fn read_message(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let length = usize::from(stream.read_u16().await.ok()?);
    if !(HEADER_BYTES..=QUERY_BYTES_MAX).contains(&length) {
        return None;
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await.ok()?;
    Some(bytes)
}

/// Parses a query and checks it against the policy, without a lookup.
fn first_step(policy: &Policy, bytes: &[u8], transport: Transport) -> Step {
    let query = match Query::parse(bytes) {
        Ok(query) => query,
        Err(BadQuery::Silence) => return Step::Silence,
        Err(BadQuery::Reply(reply)) => {
            let flow = flow(None, Denied::by(DenyReason::Malformed, None), 1);
            return Step::Reply(Some(reply), Some(flow));
        }
    };
    let reply = |code| query.encode(query.code(code), transport);
    let allowed = match &query.host {
        Some(host) => may_resolve(policy, host).map(|()| host),
        None => Err(Denied::by(DenyReason::NotAllowed, None)),
    };
    match allowed {
        Err(denied) => {
            let reply = reply(denied.code);
            Step::Reply(reply, Some(flow(Some(&query), denied, 1)))
        }
        // IPv4 only: an empty reply to AAAA makes clients use A at once.
        Ok(_) if query.kind != RecordType::A => Step::Reply(reply(ResponseCode::NoError), None),
        Ok(host) => {
            let host = host.clone();
            Step::LookUp(query, host)
        }
    }
}

/// The reply for an allowed name. Its addresses are in [`crate::dns::SentReplies`] before it is sent.
async fn find(
    sandbox: &SandboxNet,
    query: &Query,
    host: &HostName,
    transport: Transport,
) -> Option<Vec<u8>> {
    let reply = match lookup(sandbox, host).await {
        Ok(found) => {
            let lifetime = found.ttl.max(SENT_REPLY_LIFETIME);
            sandbox
                .sent_replies()
                .record(host, &found.addresses, lifetime);
            query.reply(&found.chain, &found.addresses, found.ttl)
        }
        Err(denied) => {
            let code = denied.code;
            sandbox.note(flow(Some(query), denied, 1));
            query.code(code)
        }
    };
    query.encode(reply, transport)
}

/// Adds the number of queries dropped by the rate limit to the flow log, at most once per second.
fn note_dropped(sandbox: &SandboxNet) {
    if let Some(count) = sandbox.query_limits().to_note() {
        sandbox.note(flow(None, Denied::by(DenyReason::RateLimited, None), count));
    }
}

fn note(sandbox: &SandboxNet, flow: Option<Flow>) {
    if let Some(flow) = flow {
        sandbox.note(flow);
    }
}

fn flow(query: Option<&Query>, denied: Denied, count: u64) -> Flow {
    Flow {
        at: crate::gate::now(),
        verdict: FlowVerdict::Denied,
        protocol: FlowProtocol::Dns,
        name: query.map(Query::shown),
        address: denied.address,
        port: None,
        rule: denied.rule,
        reason: Some(denied.reason),
        count,
    }
}
