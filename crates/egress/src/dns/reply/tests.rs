//! Parsing of upstream replies, valid and malformed.

use super::*;
use crate::dns::test_upstream::{a, cname};
use proptest::prelude::*;

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn reply(records: Vec<hickory_proto::rr::Record>) -> Vec<u8> {
    let mut message = Message::from_vec(&encode_query(7, &host("a.example")).unwrap()).unwrap();
    message.metadata.message_type = MessageType::Response;
    message.add_answers(records);
    message.to_vec().unwrap()
}

fn read_ours(bytes: &[u8]) -> Result<Reply, ReplyError> {
    read(bytes, 7, &host("a.example"))
}

#[test]
fn an_encoded_query_has_only_the_name() {
    let bytes = encode_query(0x1234, &host("a.example")).unwrap();
    let mut want = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    want.extend(b"\x01a\x07example\x00\x00\x01\x00\x01");
    assert_eq!(bytes, want);
}

#[test]
fn records_of_other_types_and_classes_are_skipped() {
    let mut chaos = a("a.example", 60, "6.6.6.6");
    chaos.dns_class = DNSClass::CH;
    let text = hickory_proto::rr::rdata::TXT::new(vec!["x".repeat(200)]);
    let mut other = a("a.example", 60, "6.6.6.6");
    other.data = hickory_proto::rr::RData::TXT(text);
    let bytes = reply(vec![other, chaos, a("a.example", 60, "8.8.8.8")]);
    let Ok(Reply::Records(records)) = read_ours(&bytes) else {
        panic!("not records");
    };
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].data, Data::Address(Ipv4Addr::new(8, 8, 8, 8)));
}

#[test]
fn an_address_has_four_bytes() {
    for length in [0, 3, 5, 16, 255] {
        let mut bytes = reply(vec![a("a.example", 60, "8.8.8.8")]);
        let at = bytes.len() - 5;
        bytes[at] = length;
        bytes.extend([0; 64]);
        assert_eq!(read_ours(&bytes), Err(ReplyError::Malformed), "{length}");
    }
}

#[test]
fn records_and_addresses_are_limited() {
    let bytes = reply(crate::dns::test_upstream::many("a.example", 2000));
    let Ok(Reply::Records(records)) = read_ours(&bytes) else {
        panic!("not records");
    };
    assert_eq!(records.len(), usize::from(RECORDS_MAX));
    let led = follow(&records, &host("a.example"), CHAIN_MAX).unwrap();
    assert_eq!(led.addresses.len(), ADDRESSES_MAX);
    // A wrong record count causes neither waiting nor allocation.
    let mut lies = reply(vec![a("a.example", 60, "8.8.8.8")]);
    lies[6..8].copy_from_slice(&[0xff, 0xff]);
    assert_eq!(read_ours(&lies), Err(ReplyError::Malformed));
}

#[test]
fn compression_loops_are_malformed() {
    let mut bytes = reply(Vec::new());
    bytes[7] = 1;
    let here = u8::try_from(bytes.len()).unwrap();
    bytes.extend([0xc0, here, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 8, 8, 8, 8]);
    assert_eq!(read_ours(&bytes), Err(ReplyError::Malformed));
}

#[test]
fn a_cname_takes_precedence_over_addresses() {
    let bytes = reply(vec![
        a("a.example", 60, "6.6.6.6"),
        cname("a.example", 60, "b.example"),
        a("b.example", 60, "8.8.8.8"),
    ]);
    let Ok(Reply::Records(records)) = read_ours(&bytes) else {
        panic!("not records");
    };
    let led = follow(&records, &host("a.example"), CHAIN_MAX).unwrap();
    assert_eq!(led.chain, [host("b.example")]);
    assert_eq!(led.addresses, [Ipv4Addr::new(8, 8, 8, 8)]);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = read_ours(&bytes);
    }

    #[test]
    fn a_mutated_reply_never_panics(
        changes in prop::collection::vec((19_usize..200, any::<u8>()), 0..6), cut in 19_usize..200
    ) {
        let mut bytes = reply(vec![
            cname("a.example", 60, "b.example"),
            cname("b.example", 60, "c.example"),
            a("c.example", 60, "8.8.8.8"),
            a("c.example", 60, "8.8.4.4"),
        ]);
        for (at, to) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = to;
            }
        }
        bytes.truncate(cut);
        if let Ok(Reply::Records(records)) = read_ours(&bytes)
            && let Ok(led) = follow(&records, &host("a.example"), CHAIN_MAX)
        {
            prop_assert!(led.chain.len() <= CHAIN_MAX);
            prop_assert!(led.addresses.len() <= ADDRESSES_MAX);
        }
    }
}
