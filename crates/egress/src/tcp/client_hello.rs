//! TLS ClientHello parser: reads the server name (SNI) from the first bytes of a connection.
//!
//! Nothing is decrypted or changed: the bytes are relayed as they came. They are hostile, so what a
//! server might parse in another way is rejected: two names, an extension twice, inconsistent lengths.

use super::cursor::Cursor;
use super::policy_check::is_address;
use k8e_model::egress::HostName;
use std::collections::HashSet;

/// Largest ClientHello with all its record headers, in bytes. With post-quantum keys real ones have
/// 2 KiB; tens of KiB are known only from oversized session tickets.
pub(super) const HELLO_BYTES_MAX: usize = 64 * 1024;

const RECORD_BYTES_MAX: usize = 1 << 14;
const HANDSHAKE_HEADER_BYTES: usize = 4;

const CONTENT_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;

const EXTENSION_SERVER_NAME: u16 = 0;
const NAME_TYPE_HOST: u8 = 0;

/// Extension types of Encrypted ClientHello (ECH): the standard's and those of its drafts.
const EXTENSIONS_ENCRYPTED: [u16; 8] = [
    0xfe0d, 0xfe0c, 0xfe0b, 0xfe0a, 0xfe09, 0xff03, 0xff02, 0xffce,
];

/// The destination that a ClientHello requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientHello {
    /// The SNI; none when there is none, or an address.
    pub(super) name: Option<HostName>,
    /// Whether it has an ECH extension, which may hide another name.
    pub(super) encrypted: bool,
}

/// Why bytes are not accepted as a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientHelloError {
    /// The first byte is not that of a TLS handshake record.
    NotTls,
    /// TLS, but not a well-formed, unambiguous ClientHello.
    Malformed,
}

/// Incremental parser: takes bytes as they arrive until a ClientHello is complete. Each byte is looked
/// at once, however small the reads are.
#[derive(Default)]
pub(super) struct ClientHelloReader {
    /// Bytes of the current record header.
    header: Vec<u8>,
    /// Bytes of the current record that are still missing.
    record_left: usize,
    /// The handshake message without record headers.
    message: Vec<u8>,
    taken: usize,
}

// === impl ClientHelloReader ===

impl ClientHelloReader {
    /// Takes more bytes and returns the ClientHello once it is complete; later records are ignored.
    pub(super) fn take(
        &mut self,
        mut bytes: &[u8],
    ) -> Result<Option<ClientHello>, ClientHelloError> {
        while !bytes.is_empty() {
            bytes = if self.record_left == 0 {
                self.take_header(bytes)?
            } else {
                self.take_payload(bytes)
            };
            if self.taken > HELLO_BYTES_MAX {
                return Err(ClientHelloError::Malformed);
            }
            if let Some(body) = self.complete()? {
                return parse(body).map(Some).ok_or(ClientHelloError::Malformed);
            }
        }
        Ok(None)
    }

    /// Number of bytes parsed: once it is complete, the length of the ClientHello.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// One byte of a record header.
    fn take_header<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], ClientHelloError> {
        let Some((&first, rest)) = bytes.split_first() else {
            return Ok(bytes);
        };
        self.header.push(first);
        self.taken += 1;
        match self.header.as_slice() {
            [CONTENT_HANDSHAKE] | [_, 3] | [_, _, _] | [_, _, _, _] => {}
            // Only the very first byte decides whether this is TLS.
            [_] if self.taken == 1 => return Err(ClientHelloError::NotTls),
            [_, _, _, high, low] => {
                self.record_left = usize::from(u16::from_be_bytes([*high, *low]));
                self.header.clear();
                if self.record_left == 0 || self.record_left > RECORD_BYTES_MAX {
                    return Err(ClientHelloError::Malformed);
                }
            }
            _ => return Err(ClientHelloError::Malformed),
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

    /// The body of the message once it is complete. Nothing else may share its last record: a server
    /// could parse what follows as part of the ClientHello.
    fn complete(&self) -> Result<Option<&[u8]>, ClientHelloError> {
        let Some((header, body)) = self.message.split_at_checked(HANDSHAKE_HEADER_BYTES) else {
            return match self.message.first() {
                None | Some(&CLIENT_HELLO) => Ok(None),
                Some(_) => Err(ClientHelloError::Malformed),
            };
        };
        let [CLIENT_HELLO, high, middle, low] = *header else {
            return Err(ClientHelloError::Malformed);
        };
        let length = u32::from_be_bytes([0, high, middle, low]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > HELLO_BYTES_MAX || body.len() + self.record_left > length {
            return Err(ClientHelloError::Malformed);
        }
        Ok((body.len() == length).then_some(body))
    }
}

/// Parses the body of a ClientHello. None when it is malformed.
fn parse(body: &[u8]) -> Option<ClientHello> {
    let mut body = Cursor::new(body);
    body.skip(2 + 32)?; // version and random
    let session = body.vector_u8()?;
    let suites = body.vector_u16()?;
    let compressions = body.vector_u8()?;
    if session.len() > 32 || suites.is_empty() || suites.len() % 2 != 0 || compressions.is_empty() {
        return None;
    }
    let mut hello = ClientHello {
        name: None,
        encrypted: false,
    };
    if body.is_empty() {
        return Some(hello); // extensions are optional before TLS 1.2
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

/// The SNI extension: exactly one entry, of type host name. An address counts as no name; an invalid
/// name is rejected.
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
    // A trailing dot is not allowed here, and servers differ in how they treat it.
    if name.ends_with('.') {
        return None;
    }
    HostName::parse(name).ok().map(Some)
}

#[cfg(test)]
mod tests;
