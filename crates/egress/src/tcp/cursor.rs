//! Bounds-checked reader for the big-endian numbers and length-prefixed vectors of TLS.

/// The unread rest of a message. A read beyond its end returns none.
pub(super) struct Cursor<'a>(&'a [u8]);

// === impl Cursor ===

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// None unless all bytes are read.
    pub(super) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }

    pub(super) fn skip(&mut self, bytes: usize) -> Option<()> {
        self.bytes(bytes).map(|_| ())
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.bytes(1)?.first().copied()
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        let bytes = self.bytes(2)?;
        Some(u16::from_be_bytes(bytes.try_into().ok()?))
    }

    /// A vector with a length prefix of one byte.
    pub(super) fn vector_u8(&mut self) -> Option<&'a [u8]> {
        let length = self.u8()?;
        self.bytes(usize::from(length))
    }

    /// A vector with a length prefix of two bytes.
    pub(super) fn vector_u16(&mut self) -> Option<&'a [u8]> {
        let length = self.u16()?;
        self.bytes(usize::from(length))
    }

    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }
}
