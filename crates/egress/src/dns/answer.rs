//! What an upstream said: one message, read as far as it is of use.
//!
//! An upstream is not trusted either, nor is whoever can send packets in its name. A message counts
//! only as the reply to the question that was asked, and only aliases and addresses that the asked
//! name leads to are taken from it.

use super::name;
use hickory_proto::op::{Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use hickory_proto::serialize::binary::{BinDecodable as _, BinDecoder, DecodeError};
use k8e_model::egress::HostName;
use std::net::Ipv4Addr;

/// Addresses that are used of one answer. Nobody tries more, and each is checked and kept.
pub(super) const ADDRESSES_MAX: usize = 32;

/// Aliases from the asked name to its addresses, over all questions that took. Real ones have two
/// or three; more is a loop, or somebody who wants us to ask on and on.
pub(super) const CHAIN_MAX: usize = 8;

/// Records that are looked at: more addresses than any name has, and an end to reading.
const RECORDS_MAX: u16 = 1024;

/// What came back.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// There is more of it than fits a datagram.
    Truncated,
    /// The upstream would not, or could not, answer.
    Failed,
    /// There is no such name.
    NoName,
    /// These, in the order they came.
    Records(Vec<Record>),
}

/// An alias or an address of a host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) owner: HostName,
    pub(super) ttl: u32,
    pub(super) data: Data,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Data {
    Address(Ipv4Addr),
    /// None when it is not the name of a host, so that nobody can say whether it is denied.
    Alias(Option<HostName>),
}

/// Why a message is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// Not the reply to this question: it may still come.
    NotOurs,
    /// The reply to it, and broken.
    Malformed,
}

/// Where a name leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Led {
    /// The aliases on the way, the last of which has the addresses.
    pub(super) chain: Vec<HostName>,
    /// None: the last name is to be asked for.
    pub(super) addresses: Vec<Ipv4Addr>,
    /// The shortest of what was used.
    pub(super) ttl: u32,
}

/// The way is longer than [`CHAIN_MAX`], or leads to what is no host.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeadsNowhere;

/// The question for the addresses of a name.
pub(super) fn question(id: u16, host: &HostName) -> Option<Vec<u8>> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name::from_host(host), RecordType::A));
    message.to_vec().ok()
}

/// Reads the reply to the question `id` for `host`.
pub(super) fn read(bytes: &[u8], id: u16, host: &HostName) -> Result<Answer, NoAnswer> {
    let mut decoder = BinDecoder::new(bytes);
    let header = Header::read(&mut decoder).map_err(|_| NoAnswer::NotOurs)?;
    let reply = header.message_type == MessageType::Response && header.op_code == OpCode::Query;
    if !reply || header.id != id || header.counts.queries != 1 {
        return Err(NoAnswer::NotOurs);
    }
    let asked = Query::read(&mut decoder).map_err(|_| NoAnswer::NotOurs)?;
    let ours = asked.query_type() == RecordType::A && asked.query_class() == DNSClass::IN;
    if !ours || name::to_host(asked.name()).as_ref() != Some(host) {
        return Err(NoAnswer::NotOurs);
    }
    if header.truncation {
        return Ok(Answer::Truncated);
    }
    if header.response_code == ResponseCode::NXDomain {
        return Ok(Answer::NoName);
    }
    if header.response_code != ResponseCode::NoError {
        return Ok(Answer::Failed);
    }
    let mut records = Vec::new();
    for _ in 0..header.counts.answers.min(RECORDS_MAX) {
        let record = read_record(&mut decoder).map_err(|_| NoAnswer::Malformed)?;
        records.extend(record);
    }
    Ok(Answer::Records(records))
}

/// The next record; none when it is of no use. Not with hickory's own reader, which takes the whole
/// message for broken when one record of any kind is, and writes to our log what it does not like.
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

/// Follows aliases from `host`, at most `steps` of them, to addresses or to the end.
pub(super) fn follow(
    records: &[Record],
    host: &HostName,
    steps: usize,
) -> Result<Led, LeadsNowhere> {
    let mut led = Led {
        chain: Vec::new(),
        addresses: Vec::new(),
        ttl: u32::MAX,
    };
    let mut at = host;
    // An alias has nothing beside it, so it comes before addresses.
    while let Some((next, ttl)) = alias_of(records, at) {
        if led.chain.len() >= steps {
            return Err(LeadsNowhere);
        }
        at = next.ok_or(LeadsNowhere)?;
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
