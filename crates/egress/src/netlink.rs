//! Minimal netlink client for addresses, routes and nftables rules: messages are built in one buffer,
//! sent with one call, and each is acknowledged by the kernel.
//!
//! A netlink library, or running `nft`, would cost more for each sandbox than the work itself.

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto,
    socket_with,
};
use std::io;
use std::os::fd::OwnedFd;

pub(crate) const REQUEST: u16 = 0x1;
pub(crate) const ACK: u16 = 0x4;
pub(crate) const REPLACE: u16 = 0x100;
pub(crate) const EXCLUSIVE: u16 = 0x200;
pub(crate) const CREATE: u16 = 0x400;
pub(crate) const APPEND: u16 = 0x800;

const ERROR: u16 = 0x2;
const HEADER: usize = 16;

/// Largest reply: an acknowledgement repeats the header of the request, an error all of it.
const REPLY_BYTES_MAX: usize = 8192;

/// A netlink socket. It belongs to the network namespace in which it was opened.
pub(crate) struct Netlink(OwnedFd);

/// A batch of encoded messages.
#[derive(Default)]
pub(crate) struct Messages {
    bytes: Vec<u8>,
    /// Number of messages with the ACK flag.
    acknowledged: usize,
}

/// Writes the attributes of a message or of a nested attribute.
pub(crate) struct Attributes<'a> {
    bytes: &'a mut Vec<u8>,
}

// === impl Netlink ===

impl Netlink {
    /// Opens a socket; without a protocol it is rtnetlink (`NETLINK_ROUTE`, number 0).
    pub(crate) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        Ok(Self(socket))
    }

    /// Sends all messages and waits for their acknowledgements.
    pub(crate) fn execute(&self, messages: &Messages) -> io::Result<()> {
        self.send(&messages.bytes)?;
        let mut left = messages.acknowledged;
        let mut reply = vec![0; REPLY_BYTES_MAX];
        while left > 0 {
            let (length, _) = recv(&self.0, &mut reply[..], RecvFlags::empty())?;
            for message in split(&reply[..length]) {
                if let Some(code) = error_of(message) {
                    match code {
                        0 => left = left.saturating_sub(1),
                        code => return Err(io::Error::from_raw_os_error(-code)),
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends one request and returns the first message of the reply.
    pub(crate) fn query(&self, messages: &Messages) -> io::Result<Vec<u8>> {
        self.send(&messages.bytes)?;
        let mut reply = vec![0; REPLY_BYTES_MAX];
        let (length, _) = recv(&self.0, &mut reply[..], RecvFlags::empty())?;
        let message = split(&reply[..length]).next().unwrap_or_default();
        match error_of(message) {
            Some(code) if code != 0 => Err(io::Error::from_raw_os_error(-code)),
            Some(_) | None => Ok(message.to_vec()),
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        sendto(&self.0, bytes, SendFlags::empty(), &kernel)?;
        Ok(())
    }
}

// === impl Messages ===

impl Messages {
    /// Adds a message: type, flags, the fixed header of its protocol, and attributes.
    pub(crate) fn add(
        &mut self,
        kind: u16,
        flags: u16,
        fixed: &[u8],
        attributes: impl FnOnce(&mut Attributes<'_>),
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes
            .extend_from_slice(&(flags | REQUEST).to_ne_bytes());
        // Sequence number and port id, which are not used.
        self.bytes.extend_from_slice(&[0; 8]);
        self.bytes.extend_from_slice(fixed);
        pad(&mut self.bytes);
        attributes(&mut Attributes {
            bytes: &mut self.bytes,
        });
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.acknowledged += usize::from(flags & ACK != 0);
    }
}

// === impl Attributes ===

impl Attributes<'_> {
    pub(crate) fn put(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.nest(kind, |inner| inner.bytes.extend_from_slice(value))
    }

    /// A string with a terminating zero.
    pub(crate) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.nest(kind, |inner| {
            inner.bytes.extend_from_slice(value.as_bytes());
            inner.bytes.push(0);
        })
    }

    /// A number in network byte order, as in nftables attributes.
    pub(crate) fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.put(kind, &value.to_be_bytes())
    }

    pub(crate) fn nest(&mut self, kind: u16, inner: impl FnOnce(&mut Attributes<'_>)) -> &mut Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        inner(&mut Attributes { bytes: self.bytes });
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        pad(self.bytes);
        self
    }

    /// The fixed header of a nested message.
    pub(crate) fn raw(&mut self, value: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(value);
        pad(self.bytes);
        self
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn split(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?);
        let length = usize::try_from(length).ok()?;
        let message = bytes.get(..length).filter(|_| length >= HEADER)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The error code of an acknowledgement (`NLMSG_ERROR`): 0 for success.
fn error_of(message: &[u8]) -> Option<i32> {
    let kind = u16::from_ne_bytes(*message.get(4..)?.first_chunk()?);
    let code = i32::from_ne_bytes(*message.get(HEADER..)?.first_chunk()?);
    (kind == ERROR).then_some(code)
}
