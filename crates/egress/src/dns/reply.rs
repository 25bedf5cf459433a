//! Parser for replies of upstream resolvers.
//!
//! Upstreams are not trusted, and replies over UDP can be spoofed. A message is accepted only as the
//! reply to the query that was sent (id, name, type, class), and only CNAME and A records in the alias
//! chain of the queried name are used.

use super::name;
use hickory_proto::op::{Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use hickory_proto::serialize::binary::{BinDecodable as _, BinDecoder, DecodeError};
use k8e_model::egress::HostName;
use std::net::Ipv4Addr;

/// Addresses used of one reply. Clients try no more, and each costs a check and memory.
pub(super) const ADDRESSES_MAX: usize = 32;

/// CNAMEs from the queried name to its addresses, over all queries that took. Real chains have two or
/// three; a longer one is a loop, or an attempt to cause endless queries.
pub(super) const CHAIN_MAX: usize = 8;

/// Answer records that are parsed: more than any real name has.
const RECORDS_MAX: u16 = 1024;

/// The reply of an upstream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// TC flag: the reply does not fit a datagram, so it has to be queried over TCP.
    Truncated,
    /// SERVFAIL, REFUSED or another error code.
    Failed,
    /// NXDOMAIN.
    NoName,
    /// CNAME and A records, in the order of the message.
    Records(Vec<Record>),
}

/// A CNAME or A record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) owner: HostName,
    pub(super) ttl: u32,
    pub(super) data: Data,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Data {
    Address(Ipv4Addr),
    /// The target of a CNAME; none when it is no valid host name, which no rule could match.
    Alias(Option<HostName>),
}

/// Why a message is not accepted as a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyError {
    /// Not the reply to this query; the real one may still arrive.
    NotOurs,
    /// The reply to this query, but malformed.
    Malformed,
}

/// The end of an alias chain in one reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Followed {
    /// The CNAME targets in order; the last has the addresses.
    pub(super) chain: Vec<HostName>,
    /// At most [`ADDRESSES_MAX`]. Empty: the last name of the chain has to be queried.
    pub(super) addresses: Vec<Ipv4Addr>,
    /// Smallest TTL of the records used, in seconds.
    pub(super) ttl: u32,
}

/// The alias chain is longer than [`CHAIN_MAX`], or ends at an invalid host name.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadAliasChain;

/// Encodes a query for the A records of a name.
pub(super) fn encode_query(id: u16, host: &HostName) -> Option<Vec<u8>> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name::from_host(host), RecordType::A));
    message.to_vec().ok()
}

/// Parses the reply to the query `id` for `host`.
pub(super) fn read(bytes: &[u8], id: u16, host: &HostName) -> Result<Reply, ReplyError> {
    let mut decoder = BinDecoder::new(bytes);
    let header = Header::read(&mut decoder).map_err(|_| ReplyError::NotOurs)?;
    let reply = header.message_type == MessageType::Response && header.op_code == OpCode::Query;
    if !reply || header.id != id || header.counts.queries != 1 {
        return Err(ReplyError::NotOurs);
    }
    let asked = Query::read(&mut decoder).map_err(|_| ReplyError::NotOurs)?;
    let ours = asked.query_type() == RecordType::A && asked.query_class() == DNSClass::IN;
    if !ours || name::to_host(asked.name()).as_ref() != Some(host) {
        return Err(ReplyError::NotOurs);
    }
    if header.truncation {
        return Ok(Reply::Truncated);
    }
    if header.response_code == ResponseCode::NXDomain {
        return Ok(Reply::NoName);
    }
    if header.response_code != ResponseCode::NoError {
        return Ok(Reply::Failed);
    }
    let mut records = Vec::new();
    for _ in 0..header.counts.answers.min(RECORDS_MAX) {
        let record = read_record(&mut decoder).map_err(|_| ReplyError::Malformed)?;
        records.extend(record);
    }
    Ok(Reply::Records(records))
}

/// The next record; none when it is neither CNAME nor A. Not by hickory's own parser, which rejects
/// the whole message when one record of any type is malformed, and logs it.
fn read_record(decoder: &mut BinDecoder<'_>) -> Result<Option<Record>, DecodeError> {
    let owner = Name::read(decoder)?;
    let kind = RecordType::read(decoder)?;
    let class = DNSClass::read(decoder)?;
    let ttl = decoder.read_u32()?.unverified();
    let length = usize::from(decoder.read_u16()?.unverified());
    let end = decoder.index() + length;
    let data = if kind == RecordType::A {
        let bits = decoder.read_u32()?.unverified();
        Data::Address(Ipv4Addr::from_bits(bits))
    } else if kind == RecordType::CNAME {
        Data::Alias(name::to_host(&Name::read(decoder)?))
    } else {
        decoder.read_slice(length)?;
        return Ok(None);
    };
    if decoder.index() != end {
        return Err(DecodeError::InsufficientBytes);
    }
    let owner = name::to_host(&owner).filter(|_| class == DNSClass::IN);
    Ok(owner.map(|owner| Record { owner, ttl, data }))
}

/// Follows CNAMEs from `host`, at most `steps` of them, to A records or to the end of the chain.
pub(super) fn follow(
    records: &[Record],
    host: &HostName,
    steps: usize,
) -> Result<Followed, BadAliasChain> {
    let mut led = Followed {
        chain: Vec::new(),
        addresses: Vec::new(),
        ttl: u32::MAX,
    };
    let mut at = host;
    // A name with a CNAME has no other records (RFC 1034), so CNAMEs come first.
    while let Some((next, ttl)) = alias_of(records, at) {
        if led.chain.len() >= steps {
            return Err(BadAliasChain);
        }
        at = next.ok_or(BadAliasChain)?;
        led.chain.push(at.clone());
        led.ttl = led.ttl.min(ttl);
    }
    for record in records.iter().filter(|record| record.owner == *at) {
        let Data::Address(address) = record.data else {
            continue;
        };
        if led.addresses.len() < ADDRESSES_MAX && !led.addresses.contains(&address) {
            led.addresses.push(address);
            led.ttl = led.ttl.min(record.ttl);
        }
    }
    Ok(led)
}

fn alias_of<'a>(records: &'a [Record], of: &HostName) -> Option<(Option<&'a HostName>, u32)> {
    records.iter().find_map(|record| match &record.data {
        Data::Alias(target) if record.owner == *of => Some((target.as_ref(), record.ttl)),
        Data::Alias(_) | Data::Address(_) => None,
    })
}

#[cfg(test)]
mod tests;
