//! Streaming UTF-8 decoder: bytes that come in chunks, as text; no character is split between two chunks.

/// Bytes of an incomplete character: a whole one has at most four.
const TORN_BYTES_MAX: usize = 3;

/// Joins characters that were split between chunks. Invalid bytes are replaced (U+FFFD).
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    torn: Vec<u8>,
}

// === impl Joiner ===

impl Joiner {
    /// The text that is complete now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        let joined;
        let bytes = if self.torn.is_empty() {
            bytes
        } else {
            self.torn.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.torn);
            &joined
        };
        let (whole, torn) = bytes.split_at(bytes.len() - torn_bytes(bytes));
        self.torn = torn.to_vec();
        String::from_utf8_lossy(whole).into_owned()
    }

    /// What is left when no more comes.
    pub(crate) fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.torn);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// How many bytes at the end are the beginning of a character.
pub(crate) fn torn_bytes(bytes: &[u8]) -> usize {
    let begins_one = |n: &usize| {
        let end = &bytes[bytes.len() - n..];
        std::str::from_utf8(end).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    };
    (1..=TORN_BYTES_MAX.min(bytes.len()))
        .find(begins_one)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_characters_are_whole_again() {
        let text = "aé€😀 ok";
        for cut in 0..text.len() {
            let mut joiner = Joiner::default();
            let (first, second) = text.as_bytes().split_at(cut);
            let joined = joiner.push(first) + &joiner.push(second) + &joiner.finish();
            assert_eq!(joined, text, "cut at {cut}");
        }
        let mut joiner = Joiner::default();
        let single: String = text.bytes().map(|b| joiner.push(&[b])).collect();
        assert_eq!(single, text);
    }

    #[test]
    fn what_is_no_text_is_replaced_and_not_kept() {
        let mut joiner = Joiner::default();
        assert_eq!(joiner.push(b"a\xff\xfeb"), "a\u{fffd}\u{fffd}b");
        assert_eq!(joiner.push(&[0x80; 10]).chars().count(), 10);
        assert_eq!(joiner.push(b"\xe2\x82"), "");
        assert_eq!(joiner.finish(), "\u{fffd}");
        assert_eq!(joiner.finish(), "");
    }
}
