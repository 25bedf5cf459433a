//! Fuzz targets for DNS queries and replies: arbitrary bytes, and the invariants of the parsers.

use super::message::{BadQuery, HEADER_BYTES, QUERY_BYTES_MAX, Query, Transport};
use super::reply::{self, CHAIN_MAX, Reply};
use hickory_proto::op::ResponseCode;
use k8e_model::egress::HostName;
use std::net::Ipv4Addr;
use std::time::Duration;

/// A query of a sandbox. Returns a summary of the outcome.
pub fn dns_query(bytes: &[u8]) -> String {
    let query = match Query::parse(bytes) {
        Err(BadQuery::Silence) => return "silence".to_owned(),
        Err(BadQuery::Reply(reply)) => {
            check_reply(&reply, bytes);
            return format!("refused {:?}", reply.get(3).map(|code| code & 15));
        }
        Ok(query) => query,
    };
    assert!(bytes.len() <= QUERY_BYTES_MAX);
    assert!(query.shown().chars().count() <= 253);
    let hosts = [host("a.example"), host("cdn.example")];
    let addresses: Vec<Ipv4Addr> = (0..32).map(Ipv4Addr::from_bits).collect();
    let replies = [
        query.code(ResponseCode::NXDomain),
        query.reply(&hosts, &addresses, Duration::MAX),
    ];
    for reply in replies {
        for (transport, most) in [(Transport::Udp, 4096), (Transport::Tcp, 65535)] {
            let reply = query.encode(reply.clone(), transport);
            let reply = reply.expect("every query can be answered");
            assert!(reply.len() <= most, "{} bytes", reply.len());
            check_reply(&reply, bytes);
        }
    }
    if let Some(host) = &query.host {
        let encoded = reply::encode_query(7, host).expect("a host name can be queried");
        let again = Query::parse(&encoded).expect("what we encode is a query");
        assert_eq!(again.host.as_ref(), Some(host));
    }
    let kind = format!("{:?}", query.kind);
    format!("{} {:.8}", query.host.is_some(), kind)
}

/// A reply of an upstream to our query. Returns a summary of the outcome.
pub fn dns_answer(bytes: &[u8]) -> String {
    let host = host("example.com");
    // As if the sender had guessed the id.
    let id = bytes.first_chunk().map_or(0, |id| u16::from_be_bytes(*id));
    let records = match reply::read(bytes, id, &host) {
        Ok(Reply::Records(records)) => records,
        other => return format!("{other:?}"),
    };
    assert!(records.len() <= bytes.len() / 11, "each has a header");
    let led = reply::follow(&records, &host, CHAIN_MAX);
    if let Ok(led) = &led {
        assert!(led.chain.len() <= CHAIN_MAX && led.addresses.len() <= reply::ADDRESSES_MAX);
    }
    let sizes = led.map(|led| (led.chain.len().min(3), led.addresses.len().min(3)));
    match sizes {
        Ok((chain, addresses)) => format!("{} {}", "c".repeat(chain), "a".repeat(addresses)),
        Err(nowhere) => format!("{nowhere:?}"),
    }
}

/// A reply has the id of its query and is never parsed as a query.
fn check_reply(reply: &[u8], to: &[u8]) {
    assert!(reply.len() >= HEADER_BYTES);
    assert_eq!(reply.get(..2), to.get(..2));
    assert_eq!(Query::parse(reply), Err(BadQuery::Silence));
}

fn host(text: &str) -> HostName {
    HostName::parse(text).expect("the constant is a valid host name")
}
