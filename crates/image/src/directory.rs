//! A directory as an image of one layer: packed by the command line into a tar that the server unpacks
//! like any other.
//!
//! Names, modes, numeric owners, times, symbolic and hard links are kept. Left out: sockets, device nodes,
//! extended attributes, and what other file systems have that are mounted in it.

use crate::error::ImageError;
use crate::hash::Hasher;
use k8e_model::Digest;
use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

const BLOCK: usize = 512;

/// Deeper ones are refused by the server as well.
const DEPTH_MAX: usize = 128;

/// What a field of a header has room for; what is longer or larger goes into a PAX record.
const NAME_BYTES_MAX: usize = 100;
const SIZE_MAX: u64 = 0o77_777_777_777;
const ID_MAX: u32 = 0o7_777_777;

/// A file of this name would be read as "take away what is below".
const WHITEOUT: &[u8] = b".wh.";

/// Writes a directory as a tar into `file`; the digest and the length of what was written.
pub(crate) fn pack(dir: &Path, file: &File) -> Result<(Digest, u64), ImageError> {
    let step = || ImageError::io::<io::Error>(format!("read {}", dir.display()));
    let top = fs::metadata(dir).map_err(step())?;
    if !top.is_dir() {
        let dir = dir.display();
        return Err(ImageError::invalid(format!("{dir} is not a directory")));
    }
    let mut packer = Packer {
        to: Hashing {
            to: BufWriter::with_capacity(1 << 20, file),
            hasher: Hasher::default(),
            bytes: 0,
        },
        device: top.dev(),
        linked: HashMap::new(),
    };
    packer.header(b"./", b'5', b"", 0, &top)?;
    packer.directory(dir, &mut Vec::new(), 0)?;
    packer.write(&[0; 2 * BLOCK])?;
    packer.to.flush().map_err(writing)?;
    Ok((packer.to.hasher.finish(), packer.to.bytes))
}

struct Packer<'a> {
    to: Hashing<BufWriter<&'a File>>,
    /// The file system that is packed.
    device: u64,
    /// Files with several names, and the first of them.
    linked: HashMap<u64, Vec<u8>>,
}

/// Hashes and counts what is written.
struct Hashing<W> {
    to: W,
    hasher: Hasher,
    bytes: u64,
}

// === impl Packer ===

impl Packer<'_> {
    /// Packs what is in a directory whose path in the archive is `path`, in the order of names.
    fn directory(
        &mut self,
        dir: &Path,
        path: &mut Vec<u8>,
        depth: usize,
    ) -> Result<(), ImageError> {
        if depth >= DEPTH_MAX {
            let dir = dir.display();
            return Err(ImageError::invalid(format!(
                "{dir} is deeper than {DEPTH_MAX} directories"
            )));
        }
        let step = || ImageError::io::<io::Error>(format!("list {}", dir.display()));
        let entries = fs::read_dir(dir).map_err(step())?;
        let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.file_name())).collect();
        let mut names = names.map_err(step())?;
        names.sort_unstable();
        for name in names {
            let before = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.as_bytes());
            self.entry(&dir.join(&name), path, name.as_bytes(), depth)?;
            path.truncate(before);
        }
        Ok(())
    }

    fn entry(
        &mut self,
        file: &Path,
        path: &mut Vec<u8>,
        name: &[u8],
        depth: usize,
    ) -> Result<(), ImageError> {
        if name.starts_with(WHITEOUT) {
            let file = file.display();
            return Err(ImageError::invalid(format!(
                "{file}: a name in an image cannot begin with \".wh.\", which means that a file is taken away"
            )));
        }
        let step = || ImageError::io::<io::Error>(format!("read {}", file.display()));
        let meta = fs::symlink_metadata(file).map_err(step())?;
        let kind = meta.file_type();
        if kind.is_dir() {
            let named = [&path[..], b"/"].concat();
            self.header(&named, b'5', b"", 0, &meta)?;
            return match meta.dev() == self.device {
                true => self.directory(file, path, depth + 1),
                // Another file system is mounted here.
                false => Ok(()),
            };
        }
        if meta.nlink() > 1 && !kind.is_symlink() {
            if let Some(first) = self.linked.get(&meta.ino()).cloned() {
                return self.header(path, b'1', &first, 0, &meta);
            }
            if kind.is_file() {
                self.linked.insert(meta.ino(), path.clone());
            }
        }
        if kind.is_symlink() {
            let target = fs::read_link(file).map_err(step())?;
            let target = target.as_os_str().as_bytes();
            return self.header(path, b'2', target, 0, &meta);
        }
        if kind.is_fifo() {
            return self.header(path, b'6', b"", 0, &meta);
        }
        match kind.is_file() {
            true => self.file(file, path, &meta),
            // Sockets belong to a process, devices to a machine.
            false => Ok(()),
        }
    }

    fn file(&mut self, file: &Path, path: &[u8], meta: &Metadata) -> Result<(), ImageError> {
        let step = || ImageError::io::<io::Error>(format!("read {}", file.display()));
        let mut from = File::open(file).map_err(step())?;
        // Of what was opened: another may have its name by now.
        let opened = from.metadata().map_err(step())?;
        let changed = || {
            let file = file.display();
            ImageError::invalid(format!("{file} changed while it was read: try again"))
        };
        if opened.ino() != meta.ino() || !opened.is_file() {
            return Err(changed());
        }
        let size = opened.len();
        self.header(path, b'0', b"", size, &opened)?;
        let copied = io::copy(&mut (&mut from).take(size), &mut self.to).map_err(writing)?;
        if copied != size {
            return Err(changed());
        }
        self.pad(size)
    }

    fn header(
        &mut self,
        path: &[u8],
        kind: u8,
        link: &[u8],
        size: u64,
        meta: &Metadata,
    ) -> Result<(), ImageError> {
        let mut records = Vec::new();
        let mut long = |key: &str, value: &[u8], is_long: bool| {
            if is_long {
                record(&mut records, key, value);
            }
        };
        long("path", path, path.len() > NAME_BYTES_MAX);
        long("linkpath", link, link.len() > NAME_BYTES_MAX);
        long("size", size.to_string().as_bytes(), size > SIZE_MAX);
        long(
            "uid",
            meta.uid().to_string().as_bytes(),
            meta.uid() > ID_MAX,
        );
        long(
            "gid",
            meta.gid().to_string().as_bytes(),
            meta.gid() > ID_MAX,
        );
        let time = (meta.mtime(), meta.mtime_nsec());
        long("mtime", seconds(time).as_bytes(), time.0 < 0 || time.1 > 0);
        if !records.is_empty() {
            let length = records.len() as u64;
            self.block(b"PaxHeaders/entry", b'x', b"", length, meta)?;
            self.write(&records)?;
            self.pad(length)?;
        }
        self.block(path, kind, link, size, meta)
    }

    /// One header; what does not fit is in records before it.
    fn block(
        &mut self,
        path: &[u8],
        kind: u8,
        link: &[u8],
        size: u64,
        meta: &Metadata,
    ) -> Result<(), ImageError> {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| {
            block[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let front = |bytes: &[u8]| bytes[..bytes.len().min(NAME_BYTES_MAX)].to_vec();
        put(0, &front(path));
        put(100, format!("{:07o}\0", meta.mode() & 0o7777).as_bytes());
        put(108, format!("{:07o}\0", meta.uid().min(ID_MAX)).as_bytes());
        put(116, format!("{:07o}\0", meta.gid().min(ID_MAX)).as_bytes());
        put(124, format!("{:011o}\0", size.min(SIZE_MAX)).as_bytes());
        let time = u64::try_from(meta.mtime()).unwrap_or(0).min(SIZE_MAX);
        put(136, format!("{time:011o}\0").as_bytes());
        put(148, b"        ");
        put(156, &[kind]);
        put(157, &front(link));
        put(257, b"ustar\x0000");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.write(&block)
    }

    fn pad(&mut self, size: u64) -> Result<(), ImageError> {
        let padding = size.wrapping_neg() % BLOCK as u64;
        self.write(&[0; BLOCK][..usize::try_from(padding).unwrap_or(0)])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.to.write_all(bytes).map_err(writing)
    }
}

// === impl Hashing ===

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Adds `LENGTH KEY=VALUE`; the length counts its own digits.
fn record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length += 1;
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Seconds with a fraction; that of a time before 1970 goes backwards, as its sign says.
fn seconds((seconds, nanos): (i64, i64)) -> String {
    match seconds < 0 && nanos > 0 {
        true => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
        false => format!("{seconds}.{nanos:09}"),
    }
}

fn writing(error: io::Error) -> ImageError {
    ImageError::io("pack a directory into a temporary file (TMPDIR says where)")(error)
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests;
