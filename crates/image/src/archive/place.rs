//! Where bytes are on the client's disk: in a file, or in one without a name that was made for them.

use crate::error::ImageError;
use std::fs::{self, File};
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A part of a file.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) file: Source,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Named(PathBuf),
    /// It is gone with its last descriptor; what it was made of, for people.
    Nameless(Arc<File>, PathBuf),
}

/// Reads a file from a place on, whatever others read of it.
struct At {
    file: Arc<File>,
    offset: u64,
}

// === impl Place ===

impl Place {
    pub(crate) fn open(&self) -> Result<Box<dyn Read + Send>, ImageError> {
        let open = || -> io::Result<Box<dyn Read + Send>> {
            match &self.file {
                Source::Named(path) => {
                    let mut file = File::open(path)?;
                    file.seek(SeekFrom::Start(self.offset))?;
                    Ok(Box::new(file.take(self.bytes)))
                }
                Source::Nameless(file, _) => {
                    let at = At {
                        file: Arc::clone(file),
                        offset: self.offset,
                    };
                    Ok(Box::new(at.take(self.bytes)))
                }
            }
        };
        open().map_err(ImageError::io(format!(
            "read {}",
            self.file.path().display()
        )))
    }
}

// === impl Source ===

impl Source {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Named(path) | Self::Nameless(_, path) => path,
        }
    }
}

impl Read for At {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        #[cfg(unix)]
        let read = std::os::unix::fs::FileExt::read_at(&*self.file, buffer, self.offset)?;
        #[cfg(windows)]
        let read = std::os::windows::fs::FileExt::seek_read(&*self.file, buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// A file in the directory for temporary ones that has no name: however this process ends, it is gone.
pub(crate) fn nameless() -> Result<File, ImageError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("k8e-image-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let make = || -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        // What is packed may be secret.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        fs::remove_file(&path)?;
        Ok(file)
    };
    make().map_err(ImageError::io(format!("make {}", path.display())))
}
