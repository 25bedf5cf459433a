//! ClientHellos of a real client, hostile ones, and other bytes.

use super::*;
use crate::tcp::testing::{hello, hello_of, hello_with, message, name, record, sni, vector};
use proptest::prelude::*;

fn read(bytes: &[u8]) -> Result<Option<ClientHello>, ClientHelloError> {
    ClientHelloReader::default().take(bytes)
}

fn shown(name: Option<&str>) -> Result<Option<ClientHello>, ClientHelloError> {
    Ok(Some(ClientHello {
        name: name.map(|name| HostName::parse(name).unwrap()),
        encrypted: false,
    }))
}

/// Splits the record of a ClientHello into several records.
fn split(bytes: &[u8], pieces: usize) -> Vec<u8> {
    bytes[5..].chunks(pieces).flat_map(record).collect()
}

fn large() -> Vec<u8> {
    hello_with("big.example.com", |config| {
        config.alpn_protocols = vec![vec![b'x'; 250]; 150];
    })
}

#[test]
fn the_sni_of_a_real_client_hello() {
    let bytes = hello("Www.Example.com");
    assert_eq!(read(&bytes), shown(Some("www.example.com")));
    assert_eq!(read(&hello("192.0.2.7")), shown(None));
}

#[test]
fn a_client_hello_in_records_of_any_size() {
    let bytes = hello("example.com");
    for pieces in [1, 2, 3, 4, 5, 7, 64, 200] {
        assert_eq!(
            read(&split(&bytes, pieces)),
            shown(Some("example.com")),
            "{pieces}"
        );
    }
    let fragmented = hello_with("example.com", |config| config.max_fragment_size = Some(64));
    assert_eq!(read(&fragmented), shown(Some("example.com")));
}

#[test]
fn incremental_parsing_gives_the_same_result() {
    for bytes in [
        hello("example.com"),
        large(),
        split(&hello("example.com"), 3),
    ] {
        let mut reader = ClientHelloReader::default();
        for (at, byte) in bytes.iter().enumerate() {
            let read = reader.take(&[*byte]);
            if at + 1 < bytes.len() {
                assert_eq!(read, Ok(None), "at {at} of {}", bytes.len());
            } else {
                assert!(matches!(read, Ok(Some(_))), "{read:?}");
                assert_eq!(reader.taken(), bytes.len());
            }
        }
    }
}

#[test]
fn a_large_client_hello_has_many_records() {
    let bytes = large();
    assert!(bytes.len() > 2 * RECORD_BYTES_MAX && bytes.len() < HELLO_BYTES_MAX);
    assert_eq!(read(&bytes), shown(Some("big.example.com")));
}

#[test]
fn later_records_are_ignored() {
    let mut bytes = hello("example.com");
    let hello_bytes = bytes.len();
    bytes.extend([23, 3, 3, 0, 9, 1, 2, 3]);
    let mut reader = ClientHelloReader::default();
    assert_eq!(reader.take(&bytes), shown(Some("example.com")));
    assert_eq!(reader.taken(), hello_bytes);
}

#[test]
fn encrypted_client_hellos_are_detected() {
    for kind in [0xfe0d, 0xffce] {
        let bytes = hello_of(&[sni(b"front.example"), (kind, vec![0; 40])]);
        let read = read(&bytes).unwrap().unwrap();
        assert!(read.encrypted);
        assert_eq!(read.name, Some(name("front.example")));
    }
    assert!(
        read(&hello_of(&[(0xfe0d, Vec::new())]))
            .unwrap()
            .unwrap()
            .encrypted
    );
}

#[test]
fn a_client_hello_without_sni() {
    assert_eq!(read(&hello_of(&[])), shown(None));
    assert_eq!(
        read(&hello_of(&[(16, vec![0, 3, 2, b'h', b'2'])])),
        shown(None)
    );
    for literal in ["1.2.3.4", "::1", "[::1]", "2001:db8::7"] {
        assert_eq!(
            read(&hello_of(&[sni(literal.as_bytes())])),
            shown(None),
            "{literal}"
        );
    }
    // Without extensions at all, as before TLS 1.2.
    let mut body = vec![3, 1];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0, 5, 1, 0]);
    assert_eq!(read(&record(&message(&body))), shown(None));
}

#[test]
fn ambiguous_names_are_malformed() {
    let two_entries = {
        let entry = [&[0_u8][..], &vector(b"a.example")].concat();
        (0, vector(&[entry.clone(), entry].concat()))
    };
    let other_kind = (0, vector(&[&[1_u8][..], &vector(b"a.example")].concat()));
    let trailing = (0, [sni(b"a.example").1, vec![0]].concat());
    for extensions in [
        vec![sni(b"a.example"), sni(b"b.example")],
        vec![sni(b"a.example"), (16, vec![]), (16, vec![])],
        vec![two_entries],
        vec![other_kind],
        vec![trailing],
        vec![(0, vec![])],
        vec![(0, vector(&[]))],
        vec![sni(b"")],
        vec![sni(b"a.example.")],
        vec![sni(b"a.example\0.evil.test")],
        vec![sni(b"a.example ")],
        vec![sni(b"*.example")],
        vec![sni(b"127.1")],
        vec![sni(b"a\xff.example")],
        vec![sni("bücher.example".as_bytes())],
    ] {
        let bytes = hello_of(&extensions);
        assert_eq!(
            read(&bytes),
            Err(ClientHelloError::Malformed),
            "{extensions:x?}"
        );
    }
}

#[test]
fn the_first_byte_decides_whether_it_is_tls() {
    for bytes in [
        &b"GET / HTTP/1.1\r\n"[..],
        b"SSH-2.0-x",
        &[0x80, 0x2e, 1, 3, 1],
        &[0],
    ] {
        assert_eq!(read(bytes), Err(ClientHelloError::NotTls));
    }
}

#[test]
fn inconsistent_lengths_are_malformed() {
    let whole = hello("example.com");
    let body = &whole[9..];
    let cases = [
        ("empty record", vec![22, 3, 1, 0, 0]),
        ("record too long", vec![22, 3, 1, 0x40, 1]),
        ("other version", vec![22, 2]),
        ("no client hello", record(&[2, 0, 0, 1, 0])),
        ("too large", record(&[1, 1, 0, 1])),
        ("empty hello", record(&message(&[]))),
        (
            "more in its record",
            record(&[&message(body)[..], &[0]].concat()),
        ),
        (
            "two messages",
            record(&[message(body), message(body)].concat()),
        ),
        (
            "more in the message",
            record(&message(&[body, &[0]].concat())),
        ),
        (
            "less in the message",
            record(&message(&body[..body.len() - 1])),
        ),
        (
            "alert in between",
            [record(&[1]), vec![21, 3, 3, 0, 2, 1, 0]].concat(),
        ),
    ];
    for (what, bytes) in cases {
        assert_eq!(read(&bytes), Err(ClientHelloError::Malformed), "{what}");
    }
}

#[test]
fn tiny_records_count_against_the_size_limit() {
    let bytes = split(&large(), 1);
    assert!(bytes.len() > HELLO_BYTES_MAX);
    assert_eq!(read(&bytes), Err(ClientHelloError::Malformed));
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = read(&bytes);
        let _ = parse(&bytes);
        let _ = read(&record(&bytes));
        let _ = read(&record(&message(&bytes)));
        let _ = server_name(&bytes);
    }

    #[test]
    fn the_result_does_not_depend_on_read_sizes(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        real: bool,
        cuts in prop::collection::vec(1_usize..60, 1..20)
    ) {
        let bytes = if real { [hello("example.com"), bytes].concat() } else { record(&message(&bytes)) };
        let whole = read(&bytes);
        let mut reader = ClientHelloReader::default();
        let mut rest = &bytes[..];
        let mut pieces = Ok(None);
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            rest = after;
            pieces = reader.take(piece);
            if rest.is_empty() || pieces != Ok(None) {
                break;
            }
        }
        prop_assert_eq!(pieces, whole);
    }

    #[test]
    fn a_mutated_client_hello_never_panics(at in 0_usize..500, to: u8, pieces in 1_usize..300) {
        let mut bytes = hello("example.com");
        let at = at % bytes.len();
        bytes[at] = to;
        let _ = read(&bytes);
        let _ = read(&split(&bytes, pieces));
    }
}
