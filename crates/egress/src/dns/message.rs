//! One question of a sandbox, read strictly, and the reply to it.
//!
//! The sandbox chose every byte. What is not exactly one plain question is answered with an error
//! code or not at all, and nothing of it but the name and the type goes any further: no option, no
//! flag and no upper case letter reaches an upstream.

use super::name;
use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable as _, BinDecoder, DecodeError};
use k8e_model::egress::HostName;
use std::net::Ipv4Addr;
use std::time::Duration;

/// The largest question that is read. With its options one has 300 bytes; programs that pad theirs
/// fill 468 at most (RFC 8467).
pub(super) const QUERY_BYTES_MAX: usize = 4096;

/// RFC 1035: all that a question or a reply over UDP may have unless the client said otherwise.
const PLAIN_BYTES_MAX: usize = 512;

/// The largest reply over UDP, whatever the client says it can take. Few answers have more.
const UDP_REPLY_BYTES_MAX: u16 = 4096;

/// The longest a sandbox is told to keep an answer. Always less than the gate itself believes it
/// ([`super::BELIEVED_FOR`]), so that a program that keeps to what it was told never connects to
/// an address that the gate has forgotten; and short, so that programs see it when addresses move.
pub(super) const TOLD_TTL_MAX: Duration = Duration::from_secs(60);

/// Of a name that is no host's, where each byte can be four characters: as long as a host's.
const SHOWN_CHARS_MAX: usize = 253;

/// The head of every message.
pub(super) const HEADER_BYTES: usize = 12;

/// A question that is well formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Query {
    /// What is asked about; none when that is no name of a host.
    pub(super) host: Option<HostName>,
    /// What is asked for.
    pub(super) kind: RecordType,
    name: Name,
    id: u16,
    recursion_desired: bool,
    /// What the client takes over UDP, if it said so.
    payload: Option<u16>,
}

/// Why bytes are no [`Query`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadQuery {
    /// Not even a question: a reply to it could be a reply to a reply, without end.
    Silence,
    /// The sender is told.
    Reply(Vec<u8>),
}

/// How a reply travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

// === impl Query ===

impl Query {
    /// Reads a whole message.
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

    /// The name as it was asked, for people: what is odd in it is escaped.
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

    /// A reply that leads from the name over `chain` to the addresses.
    pub(super) fn answer(
        &self,
        chain: &[HostName],
        addresses: &[Ipv4Addr],
        ttl: Duration,
    ) -> Message {
        let ttl = ttl.min(TOLD_TTL_MAX).as_secs();
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

    /// The reply as bytes. What does not fit is left out, and the client told to ask over TCP.
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
            // Addresses come last. Those that fit are of use to clients that never ask over TCP.
            reply.metadata.truncation = true;
            let each = bytes.len().checked_div(reply.answers.len())?;
            let out = (bytes.len() - limit).div_ceil(each);
            let left = reply.answers.len().saturating_sub(out);
            reply.answers.truncate(left);
        }
    }

    fn udp_reply_bytes_max(&self) -> usize {
        let said = self.payload.map_or(PLAIN_BYTES_MAX, usize::from);
        said.clamp(PLAIN_BYTES_MAX, usize::from(UDP_REPLY_BYTES_MAX))
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
    // There is nothing yet that a name could point to.
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

/// Reads the one additional record that a question may have: OPT (RFC 6891). Of what is in it only
/// the size counts. Not with hickory's own reader, which writes to our log what it does not like.
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

/// A reply to what could not be read: no question, since there may be none.
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
