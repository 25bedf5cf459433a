//! Parsing of queries and encoding of replies.

use super::*;
use crate::dns::test_upstream::question;
use proptest::prelude::*;

fn bytes(message: &Message) -> Vec<u8> {
    message.to_vec().unwrap()
}

fn parse(message: &Message) -> Query {
    Query::parse(&bytes(message)).unwrap()
}

fn ask(name: &str) -> Query {
    parse(&question(7, name, RecordType::A))
}

fn with_edns(payload: u16) -> Message {
    let mut message = question(7, "a.example.", RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    message.set_edns(edns);
    message
}

/// The response code of the error reply.
fn code(bytes: &[u8]) -> ResponseCode {
    match Query::parse(bytes) {
        Err(BadQuery::Reply(reply)) => {
            let reply = Message::from_vec(&reply).unwrap();
            assert_eq!(reply.id, u16::from_be_bytes([bytes[0], bytes[1]]));
            assert_eq!(reply.message_type, MessageType::Response);
            assert!(reply.answers.is_empty());
            reply.response_code
        }
        other => panic!("not an error: {other:?}"),
    }
}

fn hosts(count: usize) -> Vec<HostName> {
    let name = |n| format!("{}{n}.cdn.example", "x".repeat(50));
    (0..count)
        .map(|n| HostName::parse(&name(n)).unwrap())
        .collect()
}

fn addresses(count: u32) -> Vec<Ipv4Addr> {
    (0..count)
        .map(|n| Ipv4Addr::from_bits(0x0808_0000 + n))
        .collect()
}

#[test]
fn a_plain_query() {
    let query = ask("ExAmple.COM.");
    assert_eq!(query.host.as_ref().unwrap().as_str(), "example.com");
    assert_eq!(
        (query.kind, query.id, query.payload),
        (RecordType::A, 7, None)
    );
    assert_eq!(parse(&with_edns(1232)).payload, Some(1232));
    let odd = ask("a\\.b.example.");
    assert_eq!(
        (odd.host.as_ref(), odd.shown().as_str()),
        (None, "a\\.b.example.")
    );
}

#[test]
fn a_message_that_is_no_query_gets_no_reply() {
    let mut reply = question(7, "a.example.", RecordType::A);
    reply.metadata.message_type = MessageType::Response;
    for bytes in [&bytes(&reply)[..], &[0; 11], &[]] {
        assert_eq!(Query::parse(bytes), Err(BadQuery::Silence));
    }
}

#[test]
fn anything_but_one_plain_query_is_an_error() {
    let plain = question(7, "a.example.", RecordType::A);
    let changed = |change: &dyn Fn(&mut Message)| {
        let mut message = plain.clone();
        change(&mut message);
        bytes(&message)
    };
    let record = crate::dns::test_upstream::a("a.example", 1, "8.8.8.8");
    let form_errors = [
        changed(&|message| message.queries.clear()),
        changed(&|message| message.queries.push(message.queries[0].clone())),
        changed(&|message| message.answers.push(record.clone())),
        changed(&|message| message.authorities.push(record.clone())),
        changed(&|message| message.additionals.push(record.clone())),
        changed(&|message| message.metadata.truncation = true),
        [bytes(&plain), vec![0]].concat(),
        [bytes(&plain), vec![0; 600]].concat(),
        bytes(&plain)[..20].to_vec(),
        [bytes(&with_edns(4096)), vec![0; 5000]].concat(),
    ];
    for bytes in form_errors {
        assert_eq!(code(&bytes), ResponseCode::FormErr, "{bytes:?}");
    }
    let update = changed(&|message| message.metadata.op_code = OpCode::Update);
    assert_eq!(code(&update), ResponseCode::NotImp);
    let unknown = changed(&|message| message.metadata.op_code = OpCode::Unknown(9));
    assert_eq!(code(&unknown), ResponseCode::NotImp);
    let chaos = changed(&|message| {
        message.queries[0].set_query_class(DNSClass::CH);
    });
    assert_eq!(code(&chaos), ResponseCode::Refused);
}

#[test]
fn a_compressed_name_is_an_error() {
    // "a" and then a pointer into the header, where a zero is: it would read as the name "a".
    let mut points = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    points.extend([1, b'a', 0xc0, 6, 0, 1, 0, 1]);
    assert_eq!(code(&points), ResponseCode::FormErr);
    let mut to_itself = points.clone();
    to_itself[15] = 12;
    assert_eq!(code(&to_itself), ResponseCode::FormErr);
}

#[test]
fn edns_options_are_skipped() {
    let mut message = bytes(&with_edns(1232));
    // An option that is longer than its record: options are not parsed.
    let length = message.len();
    message[length - 1] = 4;
    message.extend([0, 8, 0xff, 0xff]);
    assert_eq!(Query::parse(&message).unwrap().payload, Some(1232));
    // Padding as recommended by RFC 8467, and more.
    let mut padded = bytes(&with_edns(1232));
    padded.truncate(length - 2);
    padded.extend(3000_u16.to_be_bytes());
    padded.extend([0; 3000]);
    assert_eq!(Query::parse(&padded).unwrap().payload, Some(1232));
    // A length beyond the end of the message.
    padded.truncate(2000);
    assert_eq!(code(&padded), ResponseCode::FormErr);
    let mut version = bytes(&with_edns(1232));
    version[length - 5] = 1;
    let Err(BadQuery::Reply(reply)) = Query::parse(&version) else {
        panic!("a version that does not exist");
    };
    let reply = Message::from_vec(&reply).unwrap();
    assert_eq!(u16::from(reply.response_code), 16);
}

#[test]
fn a_reply_has_the_query_and_the_records() {
    let query = ask("ExAmple.COM.");
    let reply = query.reply(&hosts(1), &addresses(2), Duration::from_secs(30));
    let reply = Message::from_vec(&query.encode(reply, Transport::Udp).unwrap()).unwrap();
    assert!(
        reply.queries[0]
            .name()
            .eq_case(&Name::from_ascii("ExAmple.COM.").unwrap())
    );
    assert!(reply.recursion_available && !reply.truncation && reply.edns.is_none());
    let shown: Vec<String> = reply.answers.iter().map(ToString::to_string).collect();
    let alias = format!("{}.", hosts(1)[0]);
    assert_eq!(
        shown,
        [
            format!("ExAmple.COM. 30 IN CNAME {alias}"),
            format!("{alias} 30 IN A 8.8.0.0"),
            format!("{alias} 30 IN A 8.8.0.1"),
        ]
    );
}

#[test]
fn the_ttl_of_a_reply_is_capped() {
    const { assert!(SENT_TTL_MAX.as_secs() < crate::dns::SENT_REPLY_LIFETIME.as_secs()) };
    let query = ask("a.example.");
    for (ttl, told) in [(0, 0), (5, 5), (60, 60), (61, 60), (100_000, 60)] {
        let reply = query.reply(&[], &addresses(1), Duration::from_secs(ttl));
        assert_eq!(reply.answers[0].ttl, told);
    }
}

#[test]
fn records_that_do_not_fit_are_truncated() {
    for (payload, udp_max) in [(0, 512), (600, 600), (1000, 1000)] {
        let query = match payload {
            0 => ask("a.example."),
            payload => parse(&with_edns(payload)),
        };
        let full = query.reply(&hosts(2), &addresses(64), Duration::from_secs(9));
        let udp = query.encode(full.clone(), Transport::Udp).unwrap();
        assert!(
            udp.len() <= udp_max && udp.len() > udp_max - 32,
            "{}",
            udp.len()
        );
        let udp = Message::from_vec(&udp).unwrap();
        assert!(udp.truncation && udp.edns.is_some() == (payload > 0));
        assert_eq!(udp.answers[..], full.answers[..udp.answers.len()]);
        let tcp = query.encode(full.clone(), Transport::Tcp).unwrap();
        let tcp = Message::from_vec(&tcp).unwrap();
        assert!(!tcp.truncation && tcp.answers == full.answers);
    }
}

#[test]
fn incompressible_names_are_truncated_too() {
    // More labels than the encoder can compress, so that each record repeats its whole name.
    let long = |n: usize| {
        let labels: Vec<String> = (10..50).map(|label| format!("n{n}x{label}")).collect();
        HostName::parse(&labels.join(".")).unwrap()
    };
    let chain: Vec<HostName> = (0..8).map(long).collect();
    let query = parse(&with_edns(1232));
    let reply = query.reply(&chain, &addresses(32), Duration::from_secs(1));
    let reply = query.encode(reply, Transport::Udp).unwrap();
    assert!(reply.len() <= 1232 && Message::from_vec(&reply).unwrap().truncation);
}

#[test]
fn the_longest_reply_fits_a_large_datagram() {
    let long = |n: usize| {
        let label = |letter: char| format!("{letter}{n}").repeat(31);
        let text = format!(
            "{}.{}.{}.{}",
            label('a'),
            label('b'),
            label('c'),
            &label('d')[..60]
        );
        HostName::parse(&text).unwrap()
    };
    let chain: Vec<HostName> = (0..8).map(long).collect();
    let query = parse(&with_edns(65_535));
    let reply = query.reply(&chain, &addresses(32), Duration::from_secs(1));
    let reply = query.encode(reply, Transport::Udp).unwrap();
    assert!(!Message::from_vec(&reply).unwrap().truncation);
}

proptest! {
    #[test]
    fn no_bytes_panic_and_every_error_is_a_message(
        bytes in prop::collection::vec(any::<u8>(), 0..600)
    ) {
        if let Err(BadQuery::Reply(reply)) = Query::parse(&bytes) {
            Message::from_vec(&reply).unwrap();
        }
    }

    #[test]
    fn a_mutated_query_never_panics(
        at in 0_usize..60, to: u8, cut in 12_usize..80, edns: bool
    ) {
        let mut sent = match edns {
            true => bytes(&with_edns(1232)),
            false => bytes(&question(7, "www.some-name.example.", RecordType::A)),
        };
        if let Some(byte) = sent.get_mut(at) {
            *byte = to;
        }
        sent.truncate(cut);
        match Query::parse(&sent) {
            Ok(query) => {
                let reply = query.code(ResponseCode::Refused);
                let reply = query.encode(reply, Transport::Udp).unwrap();
                let reply = Message::from_vec(&reply).unwrap();
                prop_assert_eq!(reply.id.to_be_bytes(), [sent[0], sent[1]]);
                prop_assert_eq!(reply.queries[0].query_type(), query.kind);
            }
            Err(BadQuery::Reply(reply)) => drop(Message::from_vec(&reply).unwrap()),
            Err(BadQuery::Silence) => {}
        }
    }

    #[test]
    fn every_reply_parses_and_fits(
        chain in 0_usize..9, count in 0_u32..33, payload in proptest::option::of(0_u16..)
    ) {
        let query = payload.map_or_else(|| ask("a.example."), |size| parse(&with_edns(size)));
        let full = query.reply(&hosts(chain), &addresses(count), Duration::from_secs(60));
        let reply = query.encode(full.clone(), Transport::Udp).unwrap();
        prop_assert!(reply.len() <= query.udp_reply_bytes_max());
        let reply = Message::from_vec(&reply).unwrap();
        prop_assert_eq!(reply.truncation, reply.answers.len() < full.answers.len());
        prop_assert_eq!(&reply.answers[..], &full.answers[..reply.answers.len()]);
    }
}
