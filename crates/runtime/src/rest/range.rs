//! HTTP range requests (`Range: bytes=…`), for single ranges.

/// The range of a file to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Range {
    /// The whole file: no range, or one that is malformed or not supported.
    Whole,
    /// From the first to the last byte, both included.
    Part {
        /// Offset of the first byte.
        first: u64,
        /// Offset of the last byte.
        last: u64,
    },
    /// The range is beyond the end of the file (416).
    Unsatisfiable,
}

// === impl Range ===

impl Range {
    /// Parses `bytes=0-99`, `bytes=100-` or `bytes=-100` for a file of this size. Anything else, such as several
    /// ranges, is ignored, as HTTP allows.
    pub(super) fn parse(text: &str, size: u64) -> Self {
        let range = text
            .trim()
            .strip_prefix("bytes=")
            .and_then(|rest| rest.split_once('-'));
        let Some((first, last)) = range else {
            return Self::Whole;
        };
        match (number(first), number(last)) {
            (Some(Some(first)), Some(last)) => {
                let last = last.unwrap_or(u64::MAX);
                if first > last {
                    Self::Whole
                } else if first >= size {
                    Self::Unsatisfiable
                } else {
                    let last = last.min(size - 1);
                    Self::Part { first, last }
                }
            }
            (Some(None), Some(Some(0))) => Self::Unsatisfiable,
            (Some(None), Some(Some(_))) if size == 0 => Self::Unsatisfiable,
            (Some(None), Some(Some(length))) => Self::Part {
                first: size.saturating_sub(length),
                last: size - 1,
            },
            _ => Self::Whole,
        }
    }
}

/// Parses a number; `Some(None)` for an empty text, `None` for anything else.
fn number(text: &str) -> Option<Option<u64>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(None);
    }
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).map(Some)
}

#[cfg(test)]
mod tests {
    use super::Range::{self, Part, Unsatisfiable, Whole};

    #[test]
    fn single_byte_ranges_are_parsed_and_others_ignored() {
        for (text, size, want) in [
            ("bytes=0-9", 100, Part { first: 0, last: 9 }),
            (
                "bytes=90-",
                100,
                Part {
                    first: 90,
                    last: 99,
                },
            ),
            (
                "bytes=90-500",
                100,
                Part {
                    first: 90,
                    last: 99,
                },
            ),
            (
                "bytes=-10",
                100,
                Part {
                    first: 90,
                    last: 99,
                },
            ),
            ("bytes=-500", 100, Part { first: 0, last: 99 }),
            ("bytes=100-", 100, Unsatisfiable),
            ("bytes=-0", 100, Unsatisfiable),
            ("bytes=0-", 0, Unsatisfiable),
            ("bytes=-5", 0, Unsatisfiable),
            ("bytes=9-1", 100, Whole),
            ("bytes=0-1,5-6", 100, Whole),
            ("bytes=+1-2", 100, Whole),
            ("bytes=-", 100, Whole),
            ("lines=1-2", 100, Whole),
            ("bytes=99999999999999999999-", 100, Whole),
        ] {
            assert_eq!(Range::parse(text, size), want, "{text}");
        }
    }
}
