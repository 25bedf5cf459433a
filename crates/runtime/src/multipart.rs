//! Reads `multipart/form-data` as it comes, holding no more than a frame of it.

use crate::http::{Upload, UploadError};
use bytes::{Buf as _, Bytes, BytesMut};

/// Longest boundary, as RFC 2046 has it.
const BOUNDARY_BYTES_MAX: usize = 70;

/// Headers of one part: a name and a path of the longest kind.
const HEADER_BYTES_MAX: usize = 16 * 1024;

/// Parts before the one that is wanted.
const PARTS_MAX: usize = 64;

/// Where a form comes from, piece by piece.
pub(crate) trait Pieces {
    /// The next bytes, never empty; none at the end.
    async fn next(&mut self) -> Result<Option<Bytes>, UploadError>;
}

/// A body that is being read.
pub(crate) struct Multipart<P = Upload> {
    body: P,
    /// What separates parts, with the line break before it.
    delimiter: Vec<u8>,
    buffer: BytesMut,
    parts: usize,
}

/// One part.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) filename: Option<String>,
}

/// Why a body is no form.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MultipartError {
    /// The body itself failed.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// It does not follow the format.
    #[error("the multipart body is not well formed: {0}")]
    Malformed(&'static str),
}

// === impl Multipart ===

impl Pieces for Upload {
    async fn next(&mut self) -> Result<Option<Bytes>, UploadError> {
        Self::next(self).await
    }
}

impl Multipart {
    /// The boundary that a content type names, if it is that of a form.
    pub(crate) fn boundary(content_type: &str) -> Option<String> {
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
}

impl<P: Pieces> Multipart<P> {
    pub(crate) fn new(body: P, boundary: &str) -> Self {
        Self {
            body,
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            // So that the first delimiter is as all others; what comes before it is skipped.
            buffer: BytesMut::from(&b"\r\n"[..]),
            parts: 0,
        }
    }

    /// Goes to the part with that name; none when there is none.
    pub(crate) async fn find(&mut self, name: &str) -> Result<Option<Part>, MultipartError> {
        while let Some(part) = self.next_part().await? {
            if part.name == name {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    /// The next bytes of the part; none at its end.
    pub(crate) async fn data(&mut self) -> Result<Option<Bytes>, MultipartError> {
        loop {
            match find(&self.buffer, &self.delimiter) {
                Some(0) => return Ok(None),
                Some(at) => return Ok(Some(self.buffer.split_to(at).freeze())),
                None => {}
            }
            // The end may be the beginning of a delimiter.
            let sure = (self.buffer.len() + 1).saturating_sub(self.delimiter.len());
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            self.more("it ends inside a part").await?;
        }
    }

    /// The body, for what is left of it.
    pub(crate) fn body(&mut self) -> &mut P {
        &mut self.body
    }

    async fn next_part(&mut self) -> Result<Option<Part>, MultipartError> {
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
        // The line of the boundary, then headers, each line with its break, then an empty line.
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

    async fn more(&mut self, or: &'static str) -> Result<(), MultipartError> {
        let data = self.body.next().await?;
        let data = data.ok_or(MultipartError::Malformed(or))?;
        self.buffer.extend_from_slice(&data);
        Ok(())
    }
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
                // In another character set: that of the text is in front of it.
                "filename*" => {
                    let encoded = value.rsplit('\'').next().unwrap_or_default();
                    let bytes = crate::path::decode(encoded);
                    part.filename = Some(String::from_utf8_lossy(&bytes).into_owned());
                }
                _ => {}
            }
        }
    }
    part
}

/// `; name=value; other="quoted; value"`, names in lower case. A quote inside quotes is written `\"` or
/// `%22`.
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

    impl Pieces for VecDeque<Bytes> {
        async fn next(&mut self) -> Result<Option<Bytes>, UploadError> {
            Ok(self.pop_front())
        }
    }

    fn cut(body: &[u8], at: usize) -> VecDeque<Bytes> {
        body.chunks(at).map(Bytes::copy_from_slice).collect()
    }

    fn read(body: &[u8], at: usize) -> Result<Option<Vec<u8>>, MultipartError> {
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
        fn what_is_in_a_form_comes_out_however_it_is_cut(
            // Letters of which delimiters are made, so that some are nearly there.
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
        fn garbage_is_an_error_or_a_form_and_never_a_panic(
            body in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'a'), Just(b'b'), Just(b'"'), Just(b';'), Just(b'='), any::<u8>()], 0..300),
            at in 1usize..20,
        ) {
            let _ = read(&body, at);
            let text = String::from_utf8_lossy(&body);
            let _ = Multipart::boundary(&format!("multipart/form-data; {text}"));
            let _ = part(&format!("\r\ncontent-disposition:{text}\r\n\r\n"));
        }
    }

    #[test]
    fn boundaries_are_those_of_forms() {
        let boundary = |text| Multipart::boundary(text);
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
    fn names_are_read_however_they_are_written() {
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
    fn delimiters_are_found_where_they_are() {
        assert_eq!(find(b"a\r\r\n--b", b"\r\n--b"), Some(2));
        assert_eq!(find(b"\r\n--", b"\r\n--b"), None);
        assert_eq!(find(b"", b"\r\n"), None);
    }
}
