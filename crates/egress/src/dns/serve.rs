//! The sockets of a sandbox's resolver.

use super::BELIEVED_FOR;
use super::look_up::{Denied, look_up, may_ask};
use super::message::{BadQuery, HEADER_BYTES, QUERY_BYTES_MAX, Query, Transport};
use super::questions::NOTED_EVERY;
use crate::ward::{Policy, Ward};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use k8e_model::egress::{DenyReason, Flow, FlowProtocol, FlowVerdict, HostName};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// From one question on a connection to the end of the next, and for the client to take a reply.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// After an error of a socket, which would come again at once, and when too much comes in: a
/// program that asks without end costs no more than that, since the kernel drops the rest.
const PAUSE: Duration = Duration::from_millis(50);

/// Questions over UDP that are dropped before a pause.
const DROPPED_AT_ONCE: u32 = 64;

/// What is to be done about a question.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Nothing at all.
    Silence,
    /// Tell the sender this, and write down why.
    Reply(Option<Vec<u8>>, Option<Flow>),
    /// Find the addresses of the name.
    LookUp(Query, HostName),
}

/// Answers questions over UDP until it is dropped.
///
/// What is over a bound is dropped in silence: clients ask again after a while, by themselves, and
/// a reply would cost more than it helps.
pub(crate) async fn serve_udp(ward: Arc<Ward>, socket: UdpSocket) {
    let socket = Arc::new(socket);
    let mut waiting = JoinSet::new();
    // One byte more than a question may have, so that one that is too long is seen to be.
    let mut buffer = vec![0; QUERY_BYTES_MAX + 1];
    let mut dropped = 0_u32;
    loop {
        note_dropped(&ward);
        while waiting.try_join_next().is_some() {}
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            () = sleep(NOTED_EVERY), if ward.questions().has_dropped() => continue,
        };
        let Ok((length, from)) = received else {
            sleep(PAUSE).await;
            continue;
        };
        if !ward.questions().admit() {
            dropped += 1;
            if dropped >= DROPPED_AT_ONCE {
                dropped = 0;
                sleep(PAUSE).await;
            }
            continue;
        }
        match first_step(&ward.policy(), &buffer[..length], Transport::Udp) {
            Step::Silence => {}
            Step::Reply(reply, flow) => {
                note(&ward, flow);
                if let Some(reply) = reply {
                    // Whoever asked may be gone.
                    let _ = socket.send_to(&reply, from).await;
                }
            }
            Step::LookUp(query, host) => {
                let Some(place) = ward.questions().wait() else {
                    continue;
                };
                let (ward, socket) = (Arc::clone(&ward), Arc::clone(&socket));
                waiting.spawn(async move {
                    if let Some(reply) = find(&ward, &query, &host, Transport::Udp).await {
                        let _ = socket.send_to(&reply, from).await;
                    }
                    drop(place);
                });
            }
        }
    }
}

/// Answers questions over TCP until it is dropped.
pub(crate) async fn serve_tcp(ward: Arc<Ward>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        note_dropped(&ward);
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = sleep(NOTED_EVERY), if ward.questions().has_dropped() => continue,
        };
        let Ok((stream, _)) = accepted else {
            sleep(PAUSE).await;
            continue;
        };
        // A connection counts as a question, or opening and closing them would cost nothing.
        let admitted = ward.questions().admit();
        let place = admitted.then(|| ward.questions().connect().zip(ward.dns_connection()));
        let Some(place) = place.flatten() else {
            drop(stream);
            sleep(PAUSE).await;
            continue;
        };
        let ward = Arc::clone(&ward);
        connections.spawn(async move {
            let _ended = serve_connection(&ward, stream).await;
            drop(place);
        });
    }
}

/// One question after the other. None, which closes it, at its end and at whatever is wrong.
async fn serve_connection(ward: &Ward, mut stream: TcpStream) -> Option<()> {
    loop {
        let bytes = timeout(IDLE_TIMEOUT, read_message(&mut stream))
            .await
            .ok()??;
        if !ward.questions().admit() {
            return None;
        }
        let reply = match first_step(&ward.policy(), &bytes, Transport::Tcp) {
            Step::Silence => return None,
            Step::Reply(reply, flow) => {
                note(ward, flow);
                reply
            }
            Step::LookUp(query, host) => {
                let place = ward.questions().wait()?;
                let reply = find(ward, &query, &host, Transport::Tcp).await;
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

/// All that can be said to a question without asking anybody.
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
        Some(host) => may_ask(policy, host).map(|()| host),
        None => Err(Denied::by(DenyReason::NotAllowed, None)),
    };
    match allowed {
        Err(denied) => {
            let reply = reply(denied.code);
            Step::Reply(reply, Some(flow(Some(&query), denied, 1)))
        }
        // Without IPv6 there is only one kind of address; clients go on with that at once.
        Ok(_) if query.kind != RecordType::A => Step::Reply(reply(ResponseCode::NoError), None),
        Ok(host) => {
            let host = host.clone();
            Step::LookUp(query, host)
        }
    }
}

/// The reply for an allowed name. What it says is in [`crate::dns::Answers`] when it is returned.
async fn find(
    ward: &Ward,
    query: &Query,
    host: &HostName,
    transport: Transport,
) -> Option<Vec<u8>> {
    let reply = match look_up(ward, host).await {
        Ok(found) => {
            let lifetime = found.ttl.max(BELIEVED_FOR);
            ward.answers().tell(host, &found.addresses, lifetime);
            query.answer(&found.chain, &found.addresses, found.ttl)
        }
        Err(denied) => {
            let code = denied.code;
            ward.note(flow(Some(query), denied, 1));
            query.code(code)
        }
    };
    query.encode(reply, transport)
}

/// Writes down, once in a while, how many questions were dropped.
fn note_dropped(ward: &Ward) {
    if let Some(count) = ward.questions().to_note() {
        ward.note(flow(None, Denied::by(DenyReason::RateLimited, None), count));
    }
}

fn note(ward: &Ward, flow: Option<Flow>) {
    if let Some(flow) = flow {
        ward.note(flow);
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
