//! First words of anybody's, and what must hold whatever they are. For the crate `fuzz`.

use super::hello::{HELLO_BYTES_MAX, Hello, HelloReader, NoHello};

pub use super::http::fuzzing::http_head;

/// Bytes that come first on a connection. Returns what became of them.
pub fn client_hello(bytes: &[u8]) -> String {
    let whole = read(bytes, bytes.len().max(1));
    assert_eq!(read(bytes, 1 + bytes.len() % 5), whole, "however it is cut");
    let (hello, taken) = match whole {
        Ok((hello, taken)) => (hello, taken),
        Err(no) => return format!("{no:?}"),
    };
    assert!(taken <= bytes.len() && taken <= HELLO_BYTES_MAX + 5);
    let Some(hello) = hello else {
        return "more".to_owned();
    };
    // What follows does not change what was read.
    let (_, longer) = (0, [&bytes[..taken], b"\x17\x03\x03\x00\x01x"].concat());
    let again = read(&longer, longer.len()).expect("it is the same hello");
    assert_eq!(again, (Some(hello.clone()), taken));
    format!(
        "name {} encrypted {}",
        hello.name.is_some(),
        hello.encrypted
    )
}

fn read(bytes: &[u8], each: usize) -> Result<(Option<Hello>, usize), NoHello> {
    let mut reader = HelloReader::default();
    for piece in bytes.chunks(each) {
        if let Some(hello) = reader.take(piece)? {
            return Ok((Some(hello), reader.taken()));
        }
    }
    Ok((None, reader.taken()))
}
