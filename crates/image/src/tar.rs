//! Reads the headers of a tar archive: ustar, GNU and PAX, with bounds on all that is held in memory.
//!
//! A parser of our own, because those at hand split PAX records at newlines and not by their length: a
//! value with a newline in it then hides or invents records (`size` among them), and the reader loses
//! its place in the archive. What is read here is what Go's `archive/tar`, which makes nearly all
//! layers, would read; what is ambiguous is an error.

mod pax;
mod sparse;

use crate::error::ImageError;
use pax::Records;
pub(crate) use sparse::Segment;
use std::io::Read;

const BLOCK: usize = 512;

/// Of a long name or a PAX header: several paths and extended attributes fit.
const EXTENSION_BYTES_MAX: u64 = 1024 * 1024;

/// Extension headers before one entry: PAX, a long name and a long link.
const EXTENSIONS_MAX: usize = 4;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Regular,
    HardLink,
    Symlink,
    Directory,
    Fifo,
    Device,
    /// Metadata of the archive, and not a file.
    Other,
}

/// The header of one entry, extensions applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    /// Seconds since 1970 and nanoseconds.
    pub(crate) mtime: (i64, u32),
    /// Of the file, holes included.
    pub(crate) size: u64,
    /// The parts of the file that are stored, in order; none is all of it.
    pub(crate) segments: Option<Vec<Segment>>,
    /// Names and values.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// An archive that is read from front to back.
pub(crate) struct Archive<R> {
    inner: R,
    /// Of the entry's stored data, not read yet.
    data_left: u64,
    /// Behind it, up to the next block.
    padding: u64,
    /// How much of the archive was read.
    position: u64,
}

// === impl Archive ===

impl<R: Read> Archive<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            data_left: 0,
            padding: 0,
            position: 0,
        }
    }

    /// Where the data of the entry begins, until it is read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    pub(crate) fn into_inner(self) -> R {
        self.inner
    }

    /// The next entry, or none at the end of the archive. What was not read of the last is skipped.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ImageError> {
        let (mut long_path, mut long_link, mut records) = (None, None, None);
        for _ in 0..=EXTENSIONS_MAX {
            self.skip_rest()?;
            let extended = long_path.is_some() || long_link.is_some() || records.is_some();
            let Some(header) = self.header()? else {
                return match extended {
                    true => Err(damaged("it ends between a header and its entry")),
                    false => Ok(None),
                };
            };
            let size = number(&header[124..136], "size")?;
            match header[156] {
                b'L' => once(&mut long_path, text(&self.extension(size)?))?,
                b'K' => once(&mut long_link, text(&self.extension(size)?))?,
                b'x' => once(&mut records, Records::parse(&self.extension(size)?)?)?,
                // Go's reader, which Docker uses, does not apply these either.
                b'g' => drop(self.extension(size)?),
                _ => {
                    let records = records.unwrap_or_default();
                    return self.entry(&header, size, long_path, long_link, records);
                }
            }
        }
        Err(damaged("it has too many extension headers for one entry"))
    }

    /// Reads stored data of the entry; 0 at its end.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ImageError> {
        let max = usize::try_from(self.data_left).unwrap_or(usize::MAX);
        let max = max.min(buffer.len());
        if max == 0 {
            return Ok(0);
        }
        let read = self.inner.read(&mut buffer[..max]);
        match read.map_err(ImageError::io("read the layer"))? {
            0 => Err(damaged("it ends in the middle of a file")),
            read => {
                self.data_left -= read as u64;
                self.position += read as u64;
                Ok(read)
            }
        }
    }

    fn entry(
        &mut self,
        header: &[u8; BLOCK],
        size: u64,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
        records: Records,
    ) -> Result<Option<Entry>, ImageError> {
        let path = one_of(&records.path, long_path)?.unwrap_or_else(|| short_path(header));
        let link = one_of(&records.link, long_link)?.unwrap_or_else(|| text(&header[157..257]));
        let kind = match header[156] {
            b'0' | 0 if path.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' | b'S' => Kind::Regular,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' | b'4' => Kind::Device,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            // A volume's name, or where a split file goes on.
            b'V' | b'M' => Kind::Other,
            other => {
                let kind = char::from(other).escape_default();
                return Err(damaged(&format!(
                    "it has an entry of unknown type '{kind}'"
                )));
            }
        };
        if header[156] == b'0' && kind == Kind::Directory && records.size.unwrap_or(size) > 0 {
            // Some readers take it for a file and skip its data, others for a directory without.
            return Err(damaged("it has a file whose name ends with a slash"));
        }
        // Only files have data, whatever their size says: as Go's reader has it.
        self.data_left = match kind {
            Kind::Regular | Kind::Other => records.size.unwrap_or(size),
            Kind::HardLink | Kind::Symlink | Kind::Directory | Kind::Fifo | Kind::Device => 0,
        };
        self.padding = self.data_left.wrapping_neg() % BLOCK as u64;
        let mut entry = Entry {
            path,
            link,
            kind,
            mode: u32::try_from(number(&header[100..108], "mode")? & 0o7777).unwrap_or_default(),
            uid: match records.uid {
                Some(uid) => uid,
                None => number(&header[108..116], "owner")?,
            },
            gid: match records.gid {
                Some(gid) => gid,
                None => number(&header[116..124], "group")?,
            },
            mtime: match records.mtime {
                Some(mtime) => mtime,
                None => (time(&header[136..148])?, 0),
            },
            size: self.data_left,
            segments: None,
            xattrs: records.xattrs,
        };
        if kind == Kind::Regular {
            if header[156] == b'S' {
                self.gnu_sparse(header, &mut entry)?;
            } else if let Some(map) = records.sparse {
                self.pax_sparse(map, &mut entry)?;
            }
        }
        Ok(Some(entry))
    }

    /// The next header; none at the end: a block of zeroes, or nothing.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>, ImageError> {
        let mut block = [0; BLOCK];
        if !self.block(&mut block)? || block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let unsigned = |byte: &u8| i64::from(*byte);
        let signed = |byte: &u8| i64::from(byte.cast_signed());
        let spaces = 8 * i64::from(b' ');
        let around = || block[..148].iter().chain(&block[156..]);
        let sums = [
            around().map(unsigned).sum::<i64>() + spaces,
            around().map(signed).sum::<i64>() + spaces,
        ];
        let stored = number(&block[148..156], "checksum")?;
        match i64::try_from(stored).is_ok_and(|stored| sums.contains(&stored)) {
            true => Ok(Some(block)),
            false => Err(damaged("the checksum of a header is wrong")),
        }
    }

    /// Reads one block; false where there is none.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, ImageError> {
        let mut read = 0;
        while read < BLOCK {
            let more = self.inner.read(&mut block[read..]);
            match more.map_err(ImageError::io("read the layer"))? {
                0 if read == 0 => return Ok(false),
                0 => return Err(damaged("it ends in the middle of a header")),
                more => read += more,
            }
        }
        self.position += BLOCK as u64;
        Ok(true)
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>, ImageError> {
        if size > EXTENSION_BYTES_MAX {
            let max = format!("{EXTENSION_BYTES_MAX} bytes");
            return Err(ImageError::too_large(
                "an extension header of the layer",
                max,
            ));
        }
        self.data_left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        let mut read = 0;
        while read < bytes.len() {
            read += self.read(&mut bytes[read..])?;
        }
        Ok(bytes)
    }

    fn skip_rest(&mut self) -> Result<(), ImageError> {
        let mut scratch = [0; 8 * BLOCK];
        while self.data_left > 0 {
            self.read(&mut scratch)?;
        }
        self.data_left = std::mem::take(&mut self.padding);
        while self.data_left > 0 {
            self.read(&mut scratch)?;
        }
        Ok(())
    }
}

fn once<T>(place: &mut Option<T>, value: T) -> Result<(), ImageError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(damaged("an entry has two extension headers of one kind")),
    }
}

/// What PAX says, or GNU's header. Readers disagree about which of two counts.
fn one_of(pax: &Option<Vec<u8>>, gnu: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ImageError> {
    match (pax, gnu) {
        (Some(pax), Some(gnu)) if *pax != gnu => Err(damaged("an entry has two names")),
        (Some(pax), _) => Ok(Some(pax.clone())),
        (None, gnu) => Ok(gnu),
    }
}

/// Up to the first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default()
        .to_vec()
}

/// ustar has the front of a long path in a field of its own; GNU keeps other things there.
fn short_path(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = text(&header[..100]);
    let prefix = text(&header[345..500]);
    match &header[257..263] == b"ustar\0" && !prefix.is_empty() {
        true => [&prefix[..], b"/", &name].concat(),
        false => name,
    }
}

/// Octal digits, or GNU's binary for what does not fit.
fn number(field: &[u8], what: &'static str) -> Result<u64, ImageError> {
    let bad = || damaged(&format!("the {what} in a header is not a number"));
    if field[0] & 0x80 != 0 {
        // Two's complement, the highest bit set; what has more than 63 bits, or is negative, is none.
        let head = [field[0] & 0x7f];
        let mut value = 0_u64;
        for byte in head.iter().chain(&field[1..]) {
            if value >> 55 != 0 {
                return Err(bad());
            }
            value = value << 8 | u64::from(*byte);
        }
        return Ok(value);
    }
    let digits = std::str::from_utf8(field).map_err(|_| bad())?;
    let digits = digits.trim_matches(|c| c == ' ' || c == '\0');
    match digits {
        "" => Ok(0),
        digits if digits.starts_with('+') => Err(bad()),
        digits => u64::from_str_radix(digits, 8).map_err(|_| bad()),
    }
}

/// Times before 1970 are negative numbers in GNU's binary.
fn time(field: &[u8]) -> Result<i64, ImageError> {
    if field[0] == 0xff {
        let mut last = [0; 8];
        last.copy_from_slice(&field[field.len() - 8..]);
        return Ok(i64::from_be_bytes(last));
    }
    let seconds = number(field, "time")?;
    i64::try_from(seconds).map_err(|_| damaged("the time in a header is not a number"))
}

fn damaged(what: &str) -> ImageError {
    ImageError::invalid(format!(
        "the layer is not a tar archive that can be read: {what}"
    ))
}

#[cfg(test)]
mod tests;
