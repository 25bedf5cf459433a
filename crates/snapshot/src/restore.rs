//! Restoring a tree: its entries in batches, each followed by the bytes of its files.

use crate::entry::{Entry, Kind};
use crate::{Owner, Root, SnapshotError, read_manifest};
use bytes::Bytes;

/// Entries of one batch.
const BATCH_ENTRIES: usize = 256;

/// Bytes of the paths, links and attributes of one batch: a message to a guest is bounded.
const BATCH_BYTES: usize = 256 * 1024;

/// Bytes of content that are sent together.
const PIECES_BYTES: usize = 256 * 1024;

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which entry of the last batch.
    pub index: usize,
    /// Where in the file.
    pub offset: u64,
    /// The bytes.
    pub data: Bytes,
}

/// The next part of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Entries, parents before what is in them. Their content is not in them: it follows.
    Entries(Vec<Entry>),
    /// Content of files of the last batch.
    Pieces(Vec<Piece>),
}

struct Batch {
    entries: Vec<Entry>,
    bytes: usize,
}

/// Calls `send` with every part of a tree. Each chunk is checked before it is sent.
pub fn restore(
    owner: &mut Owner,
    root: &Root,
    mut send: impl FnMut(Step) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    let mut batch = Batch {
        entries: Vec::new(),
        bytes: 0,
    };
    read_manifest(owner, root, |owner, entry| {
        let xattrs = entry.xattrs.iter();
        let bytes: usize = xattrs.map(|x| x.name.len() + x.value.len()).sum();
        let bytes = bytes + entry.path.len() + entry.target.len();
        if batch.entries.len() >= BATCH_ENTRIES || batch.bytes + bytes > BATCH_BYTES {
            batch.send(owner, &mut send)?;
        }
        batch.bytes += bytes;
        batch.entries.push(entry);
        Ok(())
    })?;
    batch.send(owner, &mut send)
}

// === impl Batch ===

impl Batch {
    fn send(
        &mut self,
        owner: &mut Owner,
        send: &mut impl FnMut(Step) -> Result<(), SnapshotError>,
    ) -> Result<(), SnapshotError> {
        self.bytes = 0;
        let mut entries = std::mem::take(&mut self.entries);
        if entries.is_empty() {
            return Ok(());
        }
        let contents: Vec<_> = entries
            .iter_mut()
            .map(|entry| std::mem::take(&mut entry.content))
            .collect();
        send(Step::Entries(entries))?;
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        let mut data = Vec::new();
        for (index, content) in contents.into_iter().enumerate() {
            let mut offset = 0u64;
            for extent in content {
                let chunk = extent.chunk()?;
                owner.get(&chunk, &mut data)?;
                offset += extent.hole;
                let mut whole = Bytes::copy_from_slice(&data);
                while !whole.is_empty() {
                    let part = whole.split_to(whole.len().min(PIECES_BYTES - bytes));
                    bytes += part.len();
                    pieces.push(Piece {
                        index,
                        offset,
                        data: part.clone(),
                    });
                    offset += part.len() as u64;
                    if bytes == PIECES_BYTES {
                        bytes = 0;
                        send(Step::Pieces(std::mem::take(&mut pieces)))?;
                    }
                }
            }
        }
        match pieces.is_empty() {
            true => Ok(()),
            false => send(Step::Pieces(pieces)),
        }
    }
}

/// Bytes of regular files of a snapshot that an entry stands for.
pub(crate) fn file_bytes(entry: &Entry) -> u64 {
    match entry.kind() {
        Kind::File => entry.size,
        Kind::Directory | Kind::Symlink | Kind::HardLink | Kind::Fifo | Kind::Unspecified => 0,
    }
}
