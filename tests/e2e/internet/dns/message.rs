//! DNS messages, as RFC 1035 has them.

use super::super::zone::{Data, Record};
use std::net::IpAddr;

const HEADER_BYTES: usize = 12;
const UDP_BYTES: usize = 512;
const OPT: u16 = 41;
const IN: u16 = 1;
const A: u16 = 1;
const AAAA: u16 = 28;
const CNAME: u16 = 5;

/// An answer; it was asked to recurse, and it can.
const RESPONSE: u16 = 0x8180;
const TRUNCATED: u16 = 0x0200;
const SERVER_FAILURE: u16 = 2;
const NO_SUCH_NAME: u16 = 3;

/// What somebody asks.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) name: String,
    pub(super) kind: u16,
    id: u16,
    /// The question as it was put, to be repeated.
    raw: Vec<u8>,
}

/// How much somebody takes in one packet.
pub(super) fn udp_bytes_max(message: &[u8]) -> usize {
    let Some(question) = Question::parse(message) else {
        return UDP_BYTES;
    };
    // An OPT record comes first after the question when there is one: its class is the size.
    match message.get(HEADER_BYTES + question.raw.len()..) {
        Some([0, high, low, size_high, size_low, ..])
            if u16::from_be_bytes([*high, *low]) == OPT =>
        {
            usize::from(u16::from_be_bytes([*size_high, *size_low])).max(UDP_BYTES)
        }
        _ => UDP_BYTES,
    }
}

// === impl Question ===

impl Question {
    /// Nothing when it is none.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let questions = u16::from_be_bytes([*message.get(4)?, *message.get(5)?]);
        if questions != 1 || message[2] & 0x80 != 0 {
            return None;
        }
        let mut labels = Vec::new();
        let mut at = HEADER_BYTES;
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            let label = message.get(at..at + length)?;
            labels.push(String::from_utf8_lossy(label).into_owned());
            at += length;
        }
        let kind = u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]);
        Some(Self {
            name: labels.join("."),
            kind,
            id: u16::from_be_bytes([message[0], message[1]]),
            raw: message.get(HEADER_BYTES..at + 4)?.to_vec(),
        })
    }

    pub(super) fn failure(&self) -> Vec<u8> {
        self.message(SERVER_FAILURE, &[])
    }

    /// These records, or that there is no such name; cut off where there is no room.
    pub(super) fn answer(&self, records: Option<&[Record]>, room: usize) -> Vec<u8> {
        let Some(records) = records else {
            return self.message(NO_SUCH_NAME, &[]);
        };
        let whole = self.message(0, records);
        if whole.len() <= room {
            return whole;
        }
        self.message(TRUNCATED, &[])
    }

    fn message(&self, flags: u16, records: &[Record]) -> Vec<u8> {
        let count = u16::try_from(records.len()).expect("fewer records");
        let header = [self.id, RESPONSE | flags, 1, count, 0, 0];
        let mut bytes: Vec<u8> = header.into_iter().flat_map(u16::to_be_bytes).collect();
        bytes.extend_from_slice(&self.raw);
        for record in records {
            self.put(&mut bytes, record);
        }
        bytes
    }

    fn put(&self, bytes: &mut Vec<u8>, record: &Record) {
        let (owner, kind, data) = match &record.data {
            Data::Address(IpAddr::V4(address)) => (&record.owner, A, address.octets().to_vec()),
            Data::Address(IpAddr::V6(address)) => (&record.owner, AAAA, address.octets().to_vec()),
            Data::Alias(target) => (&record.owner, CNAME, encode(target)),
            Data::Stray(owner, IpAddr::V4(address)) => (owner, A, address.octets().to_vec()),
            Data::Stray(owner, IpAddr::V6(address)) => (owner, AAAA, address.octets().to_vec()),
            Data::Silence | Data::Failure => unreachable!("they are no records"),
        };
        if owner.eq_ignore_ascii_case(&self.name) {
            bytes.extend_from_slice(&[0xc0, 12]); // the name in the question
        } else {
            bytes.extend_from_slice(&encode(owner));
        }
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&IN.to_be_bytes());
        bytes.extend_from_slice(&record.ttl.to_be_bytes());
        let length = u16::try_from(data.len()).expect("a short record");
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&data);
    }
}

fn encode(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).expect("a short label"));
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes
}
