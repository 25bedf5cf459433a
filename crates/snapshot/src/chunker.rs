//! Content-defined chunking (FastCDC): a change in a file changes the chunks around it, and no others.

use fastcdc::v2020::FastCDC;

/// BLAKE3 of a chunk's bytes.
pub type Hash = [u8; 32];

/// Longest chunk, and so the most that is decompressed at once.
pub const CHUNK_BYTES_MAX: usize = 512 * 1024;

/// Chunk sizes of files: most source files are one chunk, and a large file is not a hundred thousand.
pub(crate) const FILE_CHUNKS: Sizes = Sizes {
    min: 32 * 1024,
    average: 128 * 1024,
    max: CHUNK_BYTES_MAX,
};

/// Chunk sizes of manifests: some thirty entries, so that one changed file does not make the entries of a thousand
/// others new.
pub(crate) const MANIFEST_CHUNKS: Sizes = Sizes {
    min: 1024,
    average: 4 * 1024,
    max: 64 * 1024,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    min: usize,
    average: usize,
    max: usize,
}

/// Names a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef {
    /// Of its bytes.
    pub hash: Hash,
    /// Its length in bytes.
    pub bytes: u32,
}

/// Cuts one stream of bytes.
#[derive(Debug)]
pub(crate) struct Chunker {
    sizes: Sizes,
    buffer: Vec<u8>,
}

// === impl Chunker ===

impl Chunker {
    pub(crate) fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            buffer: Vec::new(),
        }
    }

    /// Adds bytes; `cut` gets every chunk whose end is known now.
    pub(crate) fn push<E>(
        &mut self,
        data: &[u8],
        cut: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.buffer.extend_from_slice(data);
        // Several at once: what is left over is moved to the front.
        match self.buffer.len() >= 4 * self.sizes.max {
            true => self.drain(self.sizes.max, cut),
            false => Ok(()),
        }
    }

    /// Ends the stream: `cut` gets the rest of it.
    pub(crate) fn finish<E>(&mut self, cut: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        self.drain(0, cut)
    }

    /// Cuts while more than `keep` bytes are left: the end of a chunk depends on at most the longest chunk's bytes.
    fn drain<E>(
        &mut self,
        keep: usize,
        mut cut: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Sizes { min, average, max } = self.sizes;
        let mut start = 0;
        {
            let cutter = FastCDC::new(&self.buffer, min, average, max);
            while self.buffer.len() - start > keep {
                let (_, end) = cutter.cut(start, self.buffer.len() - start);
                cut(&self.buffer[start..end])?;
                start = end;
            }
        }
        self.buffer.drain(..start);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(bytes: usize) -> Vec<u8> {
        let mut reader = blake3::Hasher::new().finalize_xof();
        let mut data = vec![0; bytes];
        reader.fill(&mut data);
        data
    }

    fn cut(data: &[u8], step: usize) -> Vec<Vec<u8>> {
        let mut chunker = Chunker::new(FILE_CHUNKS);
        let mut chunks = Vec::new();
        let mut keep = |chunk: &[u8]| {
            chunks.push(chunk.to_vec());
            Ok::<(), ()>(())
        };
        for part in data.chunks(step) {
            chunker.push(part, &mut keep).unwrap();
        }
        chunker.finish(&mut keep).unwrap();
        chunks
    }

    #[test]
    fn chunks_do_not_depend_on_how_the_bytes_arrive() {
        let data = noise(9_000_000);
        let whole = cut(&data, data.len());
        assert_eq!(whole.concat(), data);
        assert!(whole.iter().all(|chunk| chunk.len() <= CHUNK_BYTES_MAX));
        for step in [1000, 128 * 1024, 3_000_000] {
            assert_eq!(cut(&data, step), whole, "{step}");
        }
        assert!(cut(&[], 1).is_empty());
    }

    #[test]
    fn an_insertion_changes_few_chunks() {
        let data = noise(9_000_000);
        let mut changed = data.clone();
        changed.splice(4_000_000..4_000_000, *b"inserted");
        let (before, after) = (cut(&data, 1 << 20), cut(&changed, 1 << 20));
        let new = after.iter().filter(|chunk| !before.contains(chunk)).count();
        assert!(new <= 3, "{new} of {}", after.len());
    }
}
