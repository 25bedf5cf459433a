//! Strict parser for the DNS queries of a sandbox, and the encoder of replies.
//!
//! The sandbox chose every byte. A message that is not exactly one plain query gets an error code or
//! no reply. Only name and type are used: no option, flag or upper case letter reaches an upstream,
//! where it could carry data out.

use super::name;
use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable as _, BinDecoder, DecodeError};
use k8e_model::egress::HostName;
use std::net::Ipv4Addr;
use std::time::Duration;

/// Largest query, in bytes. One with EDNS options has 300; padded ones have 468 at most (RFC 8467).
pub(super) const QUERY_BYTES_MAX: usize = 4096;

/// Largest query or reply over UDP without EDNS (RFC 1035).
const PLAIN_BYTES_MAX: usize = 512;

/// Largest reply over UDP, whatever payload size the client advertises. Few replies are larger.
const UDP_REPLY_BYTES_MAX: u16 = 4096;

/// Largest TTL in a reply to a sandbox. Always less than [`super::SENT_REPLY_LIFETIME`], so that a
/// program that honours TTLs never connects to an address that has expired here; and short, so that
/// programs notice when addresses change.
pub(super) const SENT_TTL_MAX: Duration = Duration::from_secs(60);

/// Characters shown of an invalid name, in which each byte can be escaped as four: the length of the
/// longest valid name.
const SHOWN_CHARS_MAX: usize = 253;

/// Size of the DNS message header.
pub(super) const HEADER_BYTES: usize = 12;

/// A well-formed query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Query {
    /// The queried name; none when it is no valid host name.
    pub(super) host: Option<HostName>,
    /// The queried record type.
    pub(super) kind: RecordType,
    name: Name,
    id: u16,
    recursion_desired: bool,
    /// The UDP payload size that the client advertises with EDNS.
    payload: Option<u16>,
}

/// Why a message is not accepted as a [`Query`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadQuery {
    /// Not a query at all. It gets no reply, which could cause a reply in turn, without end.
    Silence,
    /// Malformed or not supported: this error reply is sent.
    Reply(Vec<u8>),
}

/// The transport of a query and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

// === impl Query ===

impl Query {
    /// Parses a whole message.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, BadQuery> {
        let mut decoder = BinDecoder::new(bytes);
        let Ok(header) = Header::read(&mut decoder) else {
            return Err(BadQuery::Silence);
        };
        if header.message_type == MessageType::Response {
            return Err(BadQuery::Silence);
        }
        if header.op_code != OpCode::Query {
            return Err(error(&header, ResponseCode::NotImp));
        }
        read(bytes, &header, &mut decoder).map_err(|code| error(&header, code))
    }

    /// The queried name for the flow log: an invalid one is escaped.
    pub(super) fn shown(&self) -> String {
        match &self.host {
            Some(host) => host.to_string(),
            None => self.name.to_ascii().chars().take(SHOWN_CHARS_MAX).collect(),
        }
    }

    /// A reply without records.
    pub(super) fn code(&self, code: ResponseCode) -> Message {
        let mut reply = Message::response(self.id, OpCode::Query);
        reply.metadata.recursion_desired = self.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.metadata.response_code = code;
        let mut question = hickory_proto::op::Query::query(self.name.clone(), self.kind);
        question.set_query_class(DNSClass::IN);
        reply.add_query(question);
        if self.payload.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(UDP_REPLY_BYTES_MAX);
            reply.set_edns(edns);
        }
        reply
    }

    /// A reply with a CNAME chain from the name over `chain`, and A records at its end.
    pub(super) fn reply(
        &self,
        chain: &[HostName],
        addresses: &[Ipv4Addr],
        ttl: Duration,
    ) -> Message {
        let ttl = ttl.min(SENT_TTL_MAX).as_secs();
        let ttl = u32::try_from(ttl).unwrap_or(0);
        let mut reply = self.code(ResponseCode::NoError);
        let mut owner = self.name.clone();
        for host in chain {
            let target = name::from_host(host);
            let data = RData::CNAME(CNAME(target.clone()));
            reply.add_answer(Record::from_rdata(owner, ttl, data));
            owner = target;
        }
        for address in addresses {
            let data = RData::A(A(*address));
            reply.add_answer(Record::from_rdata(owner.clone(), ttl, data));
        }
        reply
    }

    /// Encodes the reply. Records that do not fit are left out and TC is set, so the client retries
    /// over TCP.
    pub(super) fn encode(&self, mut reply: Message, transport: Transport) -> Option<Vec<u8>> {
        let limit = match transport {
            Transport::Udp => self.udp_reply_bytes_max(),
            Transport::Tcp => usize::from(u16::MAX),
        };
        loop {
            let bytes = reply.to_vec().ok()?;
            if bytes.len() <= limit {
                return Some(bytes);
            }
            // A records come last. Those that fit help clients that never retry over TCP.
            reply.metadata.truncation = true;
            let each = bytes.len().checked_div(reply.answers.len())?;
            let out = (bytes.len() - limit).div_ceil(each);
            let left = reply.answers.len().saturating_sub(out);
            reply.answers.truncate(left);
        }
    }

    fn udp_reply_bytes_max(&self) -> usize {
        let advertised = self.payload.map_or(PLAIN_BYTES_MAX, usize::from);
        advertised.clamp(PLAIN_BYTES_MAX, usize::from(UDP_REPLY_BYTES_MAX))
    }
}

fn read(
    bytes: &[u8],
    header: &Header,
    decoder: &mut BinDecoder<'_>,
) -> Result<Query, ResponseCode> {
    let malformed = |_: DecodeError| ResponseCode::FormErr;
    let counts = header.counts;
    let plain = (counts.queries, counts.answers, counts.authorities) == (1, 0, 0);
    if bytes.len() > QUERY_BYTES_MAX || !plain || counts.additionals > 1 || header.truncation {
        return Err(ResponseCode::FormErr);
    }
    let name = Name::read(decoder).map_err(malformed)?;
    // No compression: there is nothing before the name that it could point to.
    let spelled_out = name.iter().map(|label| label.len() + 1).sum::<usize>() + 1;
    if decoder.index() != HEADER_BYTES + spelled_out {
        return Err(ResponseCode::FormErr);
    }
    let kind = RecordType::read(decoder).map_err(malformed)?;
    let class = DNSClass::read(decoder).map_err(malformed)?;
    let payload = match counts.additionals {
        0 => None,
        _ => Some(read_options(decoder)?),
    };
    if !decoder.is_empty() || (payload.is_none() && bytes.len() > PLAIN_BYTES_MAX) {
        return Err(ResponseCode::FormErr);
    }
    if class != DNSClass::IN {
        return Err(ResponseCode::Refused);
    }
    Ok(Query {
        host: name::to_host(&name),
        kind,
        name,
        id: header.id,
        recursion_desired: header.recursion_desired,
        payload,
    })
}

/// Parses the one additional record that a query may have: OPT (RFC 6891). Only the payload size is
/// used. Not by hickory's own parser, which logs what is malformed.
fn read_options(decoder: &mut BinDecoder<'_>) -> Result<u16, ResponseCode> {
    let malformed = |_: DecodeError| ResponseCode::FormErr;
    let owner = Name::read(decoder).map_err(malformed)?;
    let kind = RecordType::read(decoder).map_err(malformed)?;
    let payload = decoder.read_u16().map_err(malformed)?.unverified();
    let [_, version, _, _] = decoder
        .read_u32()
        .map_err(malformed)?
        .unverified()
        .to_be_bytes();
    let length = decoder.read_u16().map_err(malformed)?.unverified();
    decoder.read_slice(usize::from(length)).map_err(malformed)?;
    match (owner.is_root() && kind == RecordType::OPT, version) {
        (false, _) => Err(ResponseCode::FormErr),
        (true, 0) => Ok(payload),
        (true, _) => Err(ResponseCode::BADVERS),
    }
}

/// An error reply without a question section, since the query may have none.
fn error(header: &Header, code: ResponseCode) -> BadQuery {
    let mut reply = Message::error_msg(header.id, header.op_code, code);
    reply.metadata.recursion_desired = header.recursion_desired;
    reply.metadata.recursion_available = true;
    if code.high() > 0 {
        reply.set_edns(Edns::new());
    }
    reply.to_vec().map_or(BadQuery::Silence, BadQuery::Reply)
}

#[cfg(test)]
mod tests;
