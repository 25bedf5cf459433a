//! Reads big-endian numbers and vectors from bytes that may be anything.

/// What is left of some bytes. Every read that asks for more than there is gives nothing.
pub(super) struct Cursor<'a>(&'a [u8]);

// === impl Cursor ===

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// That nothing is left.
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

    /// Bytes after their number in one byte.
    pub(super) fn vector_u8(&mut self) -> Option<&'a [u8]> {
        let length = self.u8()?;
        self.bytes(usize::from(length))
    }

    /// Bytes after their number in two bytes.
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
