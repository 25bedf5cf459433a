//! Reads from the first bytes of a TLS connection for whom it is meant.
//!
//! Nothing here is decrypted, changed or kept: the bytes go on as they came. Whoever sent them
//! wants them to be misread, so what a server might read in another way is refused: two names, an
//! extension twice, a length that does not add up.

use super::check::is_address;
use super::cursor::Cursor;
use k8e_model::egress::HostName;
use std::collections::HashSet;

/// Of a hello with all its record headers. With post-quantum keys real ones have 2 KiB, and tens
/// of KiB are known only from tickets that nobody should send.
pub(super) const HELLO_BYTES_MAX: usize = 64 * 1024;

const RECORD_BYTES_MAX: usize = 1 << 14;
const HANDSHAKE_HEADER_BYTES: usize = 4;

const CONTENT_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;

const EXTENSION_SERVER_NAME: u16 = 0;
const NAME_TYPE_HOST: u8 = 0;

/// Encrypted ClientHello: the standard's number, and those of the drafts before it.
const EXTENSIONS_ENCRYPTED: [u16; 8] = [
    0xfe0d, 0xfe0c, 0xfe0b, 0xfe0a, 0xfe09, 0xff03, 0xff02, 0xffce,
];

/// What a ClientHello says of where it wants to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The name it shows; none when it shows none, or an address.
    pub(super) name: Option<HostName>,
    /// Whether there may be another name inside that only the server can read.
    pub(super) encrypted: bool,
}

/// Why bytes are no ClientHello that can be read in one way only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoHello {
    /// The first byte is not TLS's.
    NotTls,
    /// TLS, but not a ClientHello as it should be.
    Malformed,
}

/// Takes bytes as they come and says when a ClientHello is complete. Each byte is looked at once,
/// however small the pieces are.
#[derive(Default)]
pub(super) struct HelloReader {
    /// Of the record header that is being read.
    header: Vec<u8>,
    /// How much of the present record is still to come.
    record_left: usize,
    /// The handshake message without record headers.
    message: Vec<u8>,
    taken: usize,
}

// === impl HelloReader ===

impl HelloReader {
    /// Takes more bytes. The hello, once it is complete; bytes after it in later records are not
    /// looked at.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<Option<Hello>, NoHello> {
        while !bytes.is_empty() {
            bytes = if self.record_left == 0 {
                self.take_header(bytes)?
            } else {
                self.take_payload(bytes)
            };
            if self.taken > HELLO_BYTES_MAX {
                return Err(NoHello::Malformed);
            }
            if let Some(body) = self.complete()? {
                return parse(body).map(Some).ok_or(NoHello::Malformed);
            }
        }
        Ok(None)
    }

    /// How many bytes it has looked at: once it is complete, those of the hello.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// One byte of a record header.
    fn take_header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], NoHello> {
        let Some((&first, rest)) = bytes.split_first() else {
            return Ok(bytes);
        };
        self.header.push(first);
        self.taken += 1;
        match self.header.as_slice() {
            [CONTENT_HANDSHAKE] | [_, 3] | [_, _, _] | [_, _, _, _] => {}
            // Only the first byte of all says whether this is TLS.
            [_] if self.taken == 1 => return Err(NoHello::NotTls),
            [_, _, _, high, low] => {
                self.record_left = usize::from(u16::from_be_bytes([*high, *low]));
                self.header.clear();
                if self.record_left == 0 || self.record_left > RECORD_BYTES_MAX {
                    return Err(NoHello::Malformed);
                }
            }
            _ => return Err(NoHello::Malformed),
        }
        Ok(rest)
    }

    fn take_payload<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (payload, rest) = bytes.split_at(bytes.len().min(self.record_left));
        self.message.extend_from_slice(payload);
        self.record_left -= payload.len();
        self.taken += payload.len();
        rest
    }

    /// The body of the message once all of it is there. Nothing else may share its last record: a
    /// server could take what follows for the hello's own.
    fn complete(&self) -> Result<Option<&[u8]>, NoHello> {
        let Some((header, body)) = self.message.split_at_checked(HANDSHAKE_HEADER_BYTES) else {
            return match self.message.first() {
                None | Some(&CLIENT_HELLO) => Ok(None),
                Some(_) => Err(NoHello::Malformed),
            };
        };
        let [CLIENT_HELLO, high, middle, low] = *header else {
            return Err(NoHello::Malformed);
        };
        let length = u32::from_be_bytes([0, high, middle, low]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > HELLO_BYTES_MAX || body.len() + self.record_left > length {
            return Err(NoHello::Malformed);
        }
        Ok((body.len() == length).then_some(body))
    }
}

/// The body of a ClientHello. None when it is not exactly one.
fn parse(body: &[u8]) -> Option<Hello> {
    let mut body = Cursor::new(body);
    body.skip(2 + 32)?; // version and random
    let session = body.vector_u8()?;
    let suites = body.vector_u16()?;
    let compressions = body.vector_u8()?;
    if session.len() > 32 || suites.is_empty() || suites.len() % 2 != 0 || compressions.is_empty() {
        return None;
    }
    let mut hello = Hello {
        name: None,
        encrypted: false,
    };
    if body.is_empty() {
        return Some(hello); // before TLS 1.2 there were none
    }
    let mut extensions = Cursor::new(body.vector_u16()?);
    body.end()?;
    let mut seen = HashSet::new();
    while !extensions.is_empty() {
        let kind = extensions.u16()?;
        let data = extensions.vector_u16()?;
        if !seen.insert(kind) {
            return None;
        }
        if kind == EXTENSION_SERVER_NAME {
            hello.name = server_name(data)?;
        }
        hello.encrypted |= EXTENSIONS_ENCRYPTED.contains(&kind);
    }
    Some(hello)
}

/// Exactly one name of the one kind there is. An address is no name; anything else that is no name
/// is refused.
fn server_name(data: &[u8]) -> Option<Option<HostName>> {
    let mut outer = Cursor::new(data);
    let mut list = Cursor::new(outer.vector_u16()?);
    outer.end()?;
    if list.u8()? != NAME_TYPE_HOST {
        return None;
    }
    let name = std::str::from_utf8(list.vector_u16()?).ok()?;
    list.end()?;
    if is_address(name) {
        return Some(None);
    }
    // A last dot is not allowed here, and servers differ in what they make of it.
    if name.ends_with('.') {
        return None;
    }
    HostName::parse(name).ok().map(Some)
}

#[cfg(test)]
mod tests;
