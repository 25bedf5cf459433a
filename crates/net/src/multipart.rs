//! Streaming parser of `multipart/form-data` (RFC 7578); buffers at most one frame and one part header.

use bytes::{Buf as _, Bytes, BytesMut};

/// Longest boundary, as RFC 2046 defines it.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Size of the headers of one part: enough for a field name and a path of 4 KiB, percent-encoded.
const HEADER_BYTES_MAX: usize = 16 * 1024;

/// Number of parts that are read to find a field.
const PARTS_MAX: usize = 64;

/// A body that is read chunk by chunk.
pub trait Chunks {
    /// Why it could not be read.
    type Error;

    /// The next chunk, never empty; `None` at the end.
    fn next(&mut self) -> impl Future<Output = Result<Option<Bytes>, Self::Error>> + Send;
}

/// A form that is being parsed.
pub struct Multipart<P> {
    body: P,
    /// Delimiter between parts, with the CRLF before it.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    parts: usize,
}

/// Name and file name of one part, from its `Content-Disposition`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Name of the field.
    pub name: String,
    /// Name of the file, with whatever directories the client wrote.
    pub filename: Option<String>,
}

/// Why a form could not be parsed.
#[derive(Debug, thiserror::Error)]
pub enum MultipartError<E> {
    /// The request body could not be read.
    #[error("the request body could not be read")]
    Upload(#[from] E),
    /// The body does not follow the format.
    #[error("the multipart body is not well formed: {0}")]
    Malformed(&'static str),
}

// === impl Multipart ===

impl<P: Chunks> Multipart<P> {
    /// A form with this boundary.
    pub fn new(body: P, boundary: &str) -> Self {
        Self {
            body,
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            // With a CRLF in front, the first delimiter is like all others. A preamble is skipped.
            buffer: BytesMut::from(&b"\r\n"[..]),
            parts: 0,
        }
    }

    /// Advances to the part with this name; `None` if there is none.
    pub async fn find(&mut self, name: &str) -> Result<Option<Part>, MultipartError<P::Error>> {
        while let Some(part) = self.next_part().await? {
            if part.name == name {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    /// The next chunk of the current part; `None` at its end.
    pub async fn data(&mut self) -> Result<Option<Bytes>, MultipartError<P::Error>> {
        loop {
            match find(&self.buffer, &self.delimiter) {
                Some(0) => return Ok(None),
                Some(at) => return Ok(Some(self.buffer.split_to(at).freeze())),
                None => {}
            }
            // The last bytes may be the start of a delimiter.
            let sure = (self.buffer.len() + 1).saturating_sub(self.delimiter.len());
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            self.more("it ends inside a part").await?;
        }
    }

    /// The body, positioned after what was parsed.
    pub fn body(&mut self) -> &mut P {
        &mut self.body
    }

    /// The next part; `None` at the end.
    pub async fn next_part(&mut self) -> Result<Option<Part>, MultipartError<P::Error>> {
        self.parts += 1;
        if self.parts > PARTS_MAX {
            return Err(MultipartError::Malformed("too many parts"));
        }
        while self.data().await?.is_some() {}
        self.buffer.advance(self.delimiter.len());
        while self.buffer.len() < 2 {
            self.more("it ends inside a boundary").await?;
        }
        if self.buffer.starts_with(b"--") {
            return Ok(None);
        }
        // The rest of the boundary line, then header lines, then an empty line.
        let end = loop {
            match find(&self.buffer, b"\r\n\r\n") {
                Some(end) if end <= HEADER_BYTES_MAX => break end,
                None if self.buffer.len() <= HEADER_BYTES_MAX => {}
                Some(_) | None => {
                    return Err(MultipartError::Malformed("its headers are too long"));
                }
            }
            self.more("it ends inside a header").await?;
        };
        let head = self.buffer.split_to(end + 4);
        Ok(Some(part(&String::from_utf8_lossy(&head))))
    }

    async fn more(&mut self, or: &'static str) -> Result<(), MultipartError<P::Error>> {
        let data = self.body.next().await?;
        let data = data.ok_or(MultipartError::Malformed(or))?;
        self.buffer.extend_from_slice(&data);
        Ok(())
    }
}

/// The boundary in a `Content-Type`. `None`: it is not a form, or the boundary is missing or too long.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    options(parameters)
        .into_iter()
        .find(|(name, _)| name == "boundary")
        .map(|(_, value)| value)
        .filter(|value| (1..=BOUNDARY_BYTES_MAX).contains(&value.len()))
}

fn part(head: &str) -> Part {
    let mut part = Part::default();
    for line in head.split("\r\n") {
        let Some((header, value)) = line.split_once(':') else {
            continue;
        };
        if !header.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let (_, parameters) = value.split_once(';').unwrap_or((value, ""));
        for (name, value) in options(parameters) {
            match name.as_str() {
                "name" => part.name = value,
                "filename" if part.filename.is_none() => part.filename = Some(value),
                // RFC 8187: charset'language'percent-encoded; taken as UTF-8.
                "filename*" => {
                    let encoded = value.rsplit('\'').next().unwrap_or_default();
                    let bytes = decode(encoded);
                    part.filename = Some(String::from_utf8_lossy(&bytes).into_owned());
                }
                _ => {}
            }
        }
    }
    part
}

/// Parses header parameters, `; name=value; other="quoted; value"`, with names in lower case. A quote inside quotes is
/// written `\"` or `%22`.
fn options(text: &str) -> Vec<(String, String)> {
    let mut options = Vec::new();
    let mut rest = text;
    while let Some((name, tail)) = rest.split_once('=') {
        let name = name.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
        let (value, tail) = match tail.strip_prefix('"') {
            Some(quoted) => {
                let escaped = |at: &usize| quoted[..*at].ends_with('\\');
                let end = quoted.match_indices('"').map(|(at, _)| at);
                let end = end.into_iter().find(|at| !escaped(at));
                let end = end.unwrap_or(quoted.len());
                let value = quoted[..end].replace("\\\"", "\"").replace("%22", "\"");
                (value, quoted.get(end + 1..).unwrap_or_default())
            }
            None => {
                let end = tail.find(';').unwrap_or(tail.len());
                (tail[..end].trim().to_owned(), &tail[end..])
            }
        };
        options.push((name.trim().to_ascii_lowercase(), value));
        rest = tail;
    }
    options
}

/// Percent-decodes; what is not an escape stays as it is.
fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let digit = |at: usize| {
            bytes
                .get(at)
                .and_then(|byte| char::from(*byte).to_digit(16))
        };
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.extend(u8::try_from(high << 4 | low));
                at += 3;
            }
            _ => {
                decoded.push(*byte);
                at += 1;
            }
        }
    }
    decoded
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    let first = *what.first()?;
    let mut at = 0;
    while let Some(found) = text.get(at..)?.iter().position(|byte| *byte == first) {
        at += found;
        if text[at..].starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    impl Chunks for VecDeque<Bytes> {
        type Error = std::convert::Infallible;

        async fn next(&mut self) -> Result<Option<Bytes>, Self::Error> {
            Ok(self.pop_front())
        }
    }

    fn cut(body: &[u8], at: usize) -> VecDeque<Bytes> {
        body.chunks(at).map(Bytes::copy_from_slice).collect()
    }

    fn read(
        body: &[u8],
        at: usize,
    ) -> Result<Option<Vec<u8>>, MultipartError<std::convert::Infallible>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut form = Multipart::new(cut(body, at), "ab");
            let Some(_) = form.find("file").await? else {
                return Ok(None);
            };
            let mut content = Vec::new();
            while let Some(data) = form.data().await? {
                content.extend_from_slice(&data);
            }
            Ok(Some(content))
        })
    }

    proptest! {
        #[test]
        fn the_content_of_a_part_is_the_same_for_every_chunk_size(
            // The letters of the delimiter, so that there are many near misses.
            content in "[\r\n\\-abx]{0,200}",
            before in "[\r\n\\-abx]{0,20}",
            at in 1usize..50,
        ) {
            prop_assume!(!content.contains("\r\n--ab") && !format!("\r\n{content}").starts_with("\r\n--ab"));
            prop_assume!(!format!("\r\n{before}").contains("\r\n--ab"));
            let head = "\r\n--ab\r\nContent-Disposition: form-data; name=file\r\n\r\n";
            let body = format!("{before}{head}{content}\r\n--ab--");
            let got = read(body.as_bytes(), at).unwrap();
            prop_assert_eq!(got, Some(content.into_bytes()));
        }

        #[test]
        fn malformed_bodies_never_panic(
            body in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'a'), Just(b'b'), Just(b'"'), Just(b';'), Just(b'='), any::<u8>()], 0..300),
            at in 1usize..20,
        ) {
            let _ = read(&body, at);
            let text = String::from_utf8_lossy(&body);
            let _ = boundary(&format!("multipart/form-data; {text}"));
            let _ = part(&format!("\r\ncontent-disposition:{text}\r\n\r\n"));
        }
    }

    #[test]
    fn only_form_data_has_a_boundary() {
        assert_eq!(
            boundary("multipart/form-data; boundary=abc").as_deref(),
            Some("abc")
        );
        assert_eq!(
            boundary("Multipart/Form-Data; charset=x; boundary=\"a;b\"").as_deref(),
            Some("a;b")
        );
        assert_eq!(boundary("multipart/mixed; boundary=abc"), None);
        assert_eq!(boundary("multipart/form-data; boundary="), None);
        assert_eq!(
            boundary(&format!("multipart/form-data; boundary={:b>71}", "")),
            None
        );
    }

    #[test]
    fn names_and_file_names_are_parsed_in_every_notation() {
        let read = |line: &str| part(&format!("\r\nContent-Disposition: form-data{line}\r\n\r\n"));
        let named = |name: &str, filename: Option<&str>| Part {
            name: name.to_owned(),
            filename: filename.map(str::to_owned),
        };
        assert_eq!(
            read("; name=\"file\"; filename=\"a/b; c.txt\""),
            named("file", Some("a/b; c.txt"))
        );
        assert_eq!(
            read("; name=file; filename=\"a%22b\\\"c\""),
            named("file", Some("a\"b\"c"))
        );
        assert_eq!(
            read("; name=\"file\"; filename*=utf-8''%E2%82%AC.txt"),
            named("file", Some("€.txt"))
        );
        assert_eq!(read("; name=\"other\""), named("other", None));
        assert_eq!(read(";;=\";"), named("", None));
    }

    #[test]
    fn find_returns_the_first_position() {
        assert_eq!(find(b"a\r\r\n--b", b"\r\n--b"), Some(2));
        assert_eq!(find(b"\r\n--", b"\r\n--b"), None);
        assert_eq!(find(b"", b"\r\n"), None);
    }
}
