//! Sparse files: which parts of a file an archive stores. GNU's old header, and PAX 0.1 and 1.0.

use super::{Archive, BLOCK, Entry, damaged, number};
use crate::error::ImageError;
use std::io::Read;

/// Of one file; each costs 16 bytes of memory.
const SEGMENTS_MAX: usize = 100_000;

/// A part of a file that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// What PAX records say about a sparse file.
#[derive(Debug, Default)]
pub(super) struct PaxMap {
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    /// Of version 0.1: offsets and lengths, with commas between.
    pub(super) map: Option<Vec<u8>>,
}

// === impl PaxMap ===

impl PaxMap {
    pub(super) fn is_there(&self) -> bool {
        self.major.is_some() || self.map.is_some()
    }
}

// === impl Archive ===

impl<R: Read> Archive<R> {
    /// The old header has four parts; more come in blocks behind it.
    pub(super) fn gnu_sparse(
        &mut self,
        header: &[u8; BLOCK],
        entry: &mut Entry,
    ) -> Result<(), ImageError> {
        let mut segments = Vec::new();
        parts(&header[386..482], &mut segments)?;
        let mut more = header[482] != 0;
        while more {
            let mut block = [0; BLOCK];
            if !self.block(&mut block)? {
                return Err(damaged("it ends in the map of a sparse file"));
            }
            parts(&block[..504], &mut segments)?;
            more = block[504] != 0;
        }
        let size = number(&header[483..495], "size")?;
        self.finish(entry, segments, size)
    }

    pub(super) fn pax_sparse(&mut self, map: PaxMap, entry: &mut Entry) -> Result<(), ImageError> {
        let size = map.size.ok_or_else(malformed)?;
        let segments = match (map.major, map.minor, map.map) {
            (Some(1), Some(0), _) => self.read_map()?,
            (None | Some(0), None | Some(1), Some(text)) => {
                let text = String::from_utf8(text).map_err(|_| malformed())?;
                let numbers = text.split(',').map(str::parse);
                let numbers: Result<Vec<u64>, _> = numbers.take(2 * SEGMENTS_MAX + 1).collect();
                pairs(&numbers.map_err(|_| malformed())?)?
            }
            _ => return Err(damaged("it has a sparse file of an unknown version")),
        };
        self.finish(entry, segments, size)
    }

    /// Version 1.0: decimal numbers, one on a line, at the front of the data, up to the end of a block.
    fn read_map(&mut self) -> Result<Vec<Segment>, ImageError> {
        let mut block = [0; BLOCK];
        let mut at = BLOCK;
        let mut line = || -> Result<u64, ImageError> {
            let mut value: Option<u64> = None;
            loop {
                if at == BLOCK {
                    let mut read = 0;
                    while read < BLOCK {
                        match self.read(&mut block[read..])? {
                            0 => return Err(malformed()),
                            more => read += more,
                        }
                    }
                    at = 0;
                }
                let byte = block[at];
                at += 1;
                match (byte, value) {
                    (b'\n', Some(value)) => return Ok(value),
                    (b'0'..=b'9', _) => {
                        let digit = u64::from(byte - b'0');
                        let next = value.unwrap_or(0).checked_mul(10);
                        value = Some(
                            next.and_then(|n| n.checked_add(digit))
                                .ok_or_else(malformed)?,
                        );
                    }
                    _ => return Err(malformed()),
                }
            }
        };
        let count = usize::try_from(line()?).map_err(|_| malformed())?;
        if count > SEGMENTS_MAX {
            return Err(too_many());
        }
        let mut segments = Vec::new();
        for _ in 0..count {
            let (offset, length) = (line()?, line()?);
            segments.push(Segment { offset, length });
        }
        Ok(segments)
    }

    /// In order, within the file, and all of what is stored.
    fn finish(
        &mut self,
        entry: &mut Entry,
        segments: Vec<Segment>,
        size: u64,
    ) -> Result<(), ImageError> {
        let (mut end, mut stored) = (0_u64, 0_u64);
        for segment in &segments {
            if segment.offset < end {
                return Err(malformed());
            }
            end = segment
                .offset
                .checked_add(segment.length)
                .ok_or_else(malformed)?;
            stored += segment.length;
        }
        if end > size || stored != self.data_left {
            return Err(malformed());
        }
        entry.size = size;
        entry.segments = Some(segments);
        Ok(())
    }
}

fn parts(field: &[u8], segments: &mut Vec<Segment>) -> Result<(), ImageError> {
    for part in field.chunks_exact(24) {
        if part[0] == 0 {
            continue;
        }
        let segment = Segment {
            offset: number(&part[..12], "offset")?,
            length: number(&part[12..], "length")?,
        };
        if segments.len() >= SEGMENTS_MAX {
            return Err(too_many());
        }
        segments.push(segment);
    }
    Ok(())
}

fn pairs(numbers: &[u64]) -> Result<Vec<Segment>, ImageError> {
    if numbers.len() > 2 * SEGMENTS_MAX {
        return Err(too_many());
    }
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(malformed());
    }
    let segment = |&[offset, length]: &[u64; 2]| Segment { offset, length };
    Ok(pairs.iter().map(segment).collect())
}

fn malformed() -> ImageError {
    damaged("the map of a sparse file is malformed")
}

fn too_many() -> ImageError {
    ImageError::too_large("parts of a sparse file in the layer", SEGMENTS_MAX)
}
