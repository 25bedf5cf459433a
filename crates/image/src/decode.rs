//! A layer's compression: gzip, zstd or none, undone as it is read and never into more than a bound.

use crate::error::ImageError;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read};

/// Back references of zstd reach this far; it is held in memory. `zstd -19` uses 8 MiB, `--ultra -22` 128.
const ZSTD_WINDOW_BYTES_MAX: u64 = 128 * 1024 * 1024;

const BUFFER_BYTES: usize = 64 * 1024;

/// How the bytes of a layer are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Compression {
    /// Not at all.
    None,
    /// One gzip member or several.
    Gzip,
    /// One zstd frame or several.
    Zstd,
}

// === impl Compression ===

impl Compression {
    /// Reads the bytes of a layer uncompressed; an error after `bytes_max` of them.
    pub(crate) fn reader<'a>(self, compressed: impl Read + 'a, bytes_max: u64) -> impl Read + 'a {
        let buffered = BufReader::with_capacity(BUFFER_BYTES, compressed);
        let inner: Box<dyn Read + 'a> = match self {
            Self::None => Box::new(buffered),
            Self::Gzip => Box::new(MultiGzDecoder::new(buffered)),
            Self::Zstd => Box::new(Zstd::new(buffered)),
        };
        Bounded {
            inner,
            left: bytes_max,
        }
    }

    /// What a media type says, or none when it is not a layer's.
    pub fn of_media_type(media_type: &str) -> Option<Self> {
        let (_, kind) = media_type.split_once("/vnd.")?;
        match kind {
            "oci.image.layer.v1.tar"
            | "docker.image.rootfs.diff.tar"
            | "oci.image.layer.nondistributable.v1.tar" => Some(Self::None),
            "oci.image.layer.v1.tar+gzip"
            | "docker.image.rootfs.diff.tar.gzip"
            | "oci.image.layer.nondistributable.v1.tar+gzip" => Some(Self::Gzip),
            "oci.image.layer.v1.tar+zstd" | "docker.image.rootfs.diff.tar.zstd" => Some(Self::Zstd),
            _ => None,
        }
    }

    /// What the first bytes say.
    pub fn of_magic(bytes: &[u8]) -> Self {
        match bytes {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// A reader that fails where more comes than it may.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        match self.left.checked_sub(read as u64) {
            Some(left) => {
                self.left = left;
                Ok(read)
            }
            None => Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                "the layer is larger than it may be when uncompressed",
            )),
        }
    }
}

/// All frames of a zstd file, one after the other.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW_BYTES_MAX);
        Self {
            source,
            decoder,
            in_frame: false,
        }
    }

    /// Begins the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let skipped = io::copy(&mut (&mut self.source).take(length), &mut io::sink())?;
                    if skipped != length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                if !self.next_frame()? {
                    return Ok(0);
                }
                self.in_frame = true;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.decoder.decode_blocks(&mut self.source, strategy);
                decoded.map_err(io::Error::other)?;
            }
            match self.decoder.read(buffer)? {
                0 if !buffer.is_empty() => self.in_frame = false,
                read => return Ok(read),
            }
        }
    }
}

/// Reads at most `max` bytes, or says that there are more.
pub(crate) fn read_bounded(
    from: impl Read,
    max: usize,
    what: &'static str,
) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let read = from.take(max as u64 + 1).read_to_end(&mut bytes);
    read.map_err(ImageError::io(format!("read {what}")))?;
    if bytes.len() > max {
        return Err(ImageError::too_large(what, format!("{max} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn read(compression: Compression, bytes: &[u8], max: u64) -> io::Result<Vec<u8>> {
        let mut read = Vec::new();
        compression.reader(bytes, max).read_to_end(&mut read)?;
        Ok(read)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn several_members_and_frames_are_one_file() {
        let two = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(read(Compression::Gzip, &two, 100).unwrap(), b"one two");
        let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let two = [zstd(b"one "), skippable, zstd(b"two")].concat();
        assert_eq!(read(Compression::Zstd, &two, 100).unwrap(), b"one two");
        assert_eq!(read(Compression::None, b"abc", 3).unwrap(), b"abc");
    }

    #[test]
    fn bombs_end_at_the_bound() {
        let zeros = vec![0; 4 << 20];
        for (compression, bomb) in [
            (Compression::Gzip, gzip(&zeros)),
            (Compression::Zstd, zstd(&zeros)),
            (Compression::None, zeros.clone()),
        ] {
            assert!(compression == Compression::None || bomb.len() < 64 << 10);
            let error = read(compression, &bomb, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{compression:?}");
        }
    }

    #[test]
    fn nonsense_and_cut_files_are_errors() {
        let whole = zstd(&vec![7; 100_000]);
        assert!(read(Compression::Zstd, &whole[..whole.len() - 5], 1 << 20).is_err());
        let whole = gzip(&vec![7; 100_000]);
        assert!(read(Compression::Gzip, &whole[..whole.len() - 5], 1 << 20).is_err());
        assert!(read(Compression::Gzip, b"nonsense", 100).is_err());
        assert!(read(Compression::Zstd, b"nonsense", 100).is_err());
    }
}
