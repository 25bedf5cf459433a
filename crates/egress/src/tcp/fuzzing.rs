//! Fuzz target for the ClientHello parser: arbitrary bytes, and its invariants.

use super::client_hello::{ClientHello, ClientHelloError, ClientHelloReader, HELLO_BYTES_MAX};

pub use super::http::fuzzing::http_head;

/// The first bytes of a connection. Returns a summary of the outcome.
pub fn client_hello(bytes: &[u8]) -> String {
    let whole = read(bytes, bytes.len().max(1));
    assert_eq!(
        read(bytes, 1 + bytes.len() % 5),
        whole,
        "the result depends on how it is split"
    );
    let (hello, taken) = match whole {
        Ok((hello, taken)) => (hello, taken),
        Err(no) => return format!("{no:?}"),
    };
    assert!(taken <= bytes.len() && taken <= HELLO_BYTES_MAX + 5);
    let Some(hello) = hello else {
        return "more".to_owned();
    };
    // Bytes after the ClientHello do not change the result.
    let (_, longer) = (0, [&bytes[..taken], b"\x17\x03\x03\x00\x01x"].concat());
    let again = read(&longer, longer.len()).expect("it is the same ClientHello");
    assert_eq!(again, (Some(hello.clone()), taken));
    format!(
        "name {} encrypted {}",
        hello.name.is_some(),
        hello.encrypted
    )
}

fn read(bytes: &[u8], each: usize) -> Result<(Option<ClientHello>, usize), ClientHelloError> {
    let mut reader = ClientHelloReader::default();
    for piece in bytes.chunks(each) {
        if let Some(hello) = reader.take(piece)? {
            return Ok((Some(hello), reader.taken()));
        }
    }
    Ok((None, reader.taken()))
}
