//! Lists a directory, or a tree.

use super::resolve::lstat;
use super::{info, open_dir, target};
use crate::error::Error;
use k8e_wire::ReplySink;
use k8e_wire::proto::{Done, FileInfo, FileList, FileType, ListFiles, reply::Reply};
use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;

/// Entries listed when the request sets no limit.
const ENTRIES_MAX: u64 = 100_000;

/// Levels listed below the path: each keeps a directory open.
const DEPTH_MAX: usize = 64;

/// Entries of one reply.
const BATCH_ENTRIES: usize = 256;

/// Bytes of one reply, well below the frame limit.
const BATCH_BYTES: usize = 200 * 1024;

/// Bytes of an entry beside its names.
const ENTRY_BYTES: usize = 64;

/// Entries between two yields to other tasks.
const YIELD_EVERY: u64 = 256;

struct Level {
    dir: Dir,
    /// Length of the prefix of the path that names this directory.
    path_bytes: usize,
}

/// Entries of the next reply.
#[derive(Default)]
struct Batch {
    files: Vec<FileInfo>,
    bytes: usize,
}

// === impl Batch ===

impl Batch {
    async fn push(&mut self, replies: &mut ReplySink, file: FileInfo) -> Result<(), Error> {
        let bytes = ENTRY_BYTES + file.path.len() + file.symlink_target.len();
        if self.files.len() == BATCH_ENTRIES || self.bytes + bytes > BATCH_BYTES {
            self.flush(replies).await?;
        }
        self.bytes += bytes;
        self.files.push(file);
        Ok(())
    }

    async fn flush(&mut self, replies: &mut ReplySink) -> Result<(), Error> {
        self.bytes = 0;
        let files = std::mem::take(&mut self.files);
        if !files.is_empty() {
            replies.send(Reply::Files(FileList { files })).await?;
        }
        Ok(())
    }
}

/// Sends the entries, parents before children, otherwise unordered; the final reply has a flag for entries that
/// were left out because there are too many or they are too deep. Symbolic links are listed, never
/// followed, except in the path that is listed.
pub(crate) async fn list(replies: &mut ReplySink, request: ListFiles) -> Result<Reply, Error> {
    let max = if request.entries_max == 0 {
        ENTRIES_MAX
    } else {
        request.entries_max.min(ENTRIES_MAX)
    };
    let depth_max = match request.depth {
        0 => DEPTH_MAX,
        depth => usize::try_from(depth).unwrap_or(DEPTH_MAX).min(DEPTH_MAX),
    };
    let since_ns = request.since_unix_s.saturating_mul(1_000_000_000);
    let (dir, mut path) = open(&request)?;
    let mut levels = vec![Level {
        dir,
        path_bytes: path.len(),
    }];
    let mut batch = Batch::default();
    let (mut seen, mut listed, mut truncated) = (0u64, 0u64, false);
    while let Some(level) = levels.last_mut() {
        seen += 1;
        if seen.is_multiple_of(YIELD_EVERY) {
            tokio::task::yield_now().await;
        }
        path.truncate(level.path_bytes);
        let entry = match level.dir.read() {
            Some(Ok(entry)) => entry,
            // A directory that was removed while it was read has no more entries.
            None | Some(Err(Errno::NOENT)) => {
                levels.pop();
                continue;
            }
            Some(Err(errno)) => return Err(Error::os("list", &path)(errno)),
        };
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let Some((file, sub)) = look(level, &mut path, name, request.recursive)? else {
            continue;
        };
        if since_ns <= file.mtime_unix_ns {
            if listed == max {
                truncated = true;
                break;
            }
            listed += 1;
            batch.push(replies, file).await?;
        }
        match sub {
            // What is deeper than the request asks for is not missing from the answer.
            Some(_) if levels.len() >= depth_max => truncated |= depth_max == DEPTH_MAX,
            Some(dir) => levels.push(Level {
                dir,
                path_bytes: path.len(),
            }),
            None => {}
        }
    }
    batch.flush(replies).await?;
    Ok(Reply::Done(Done {
        bytes: 0,
        truncated,
    }))
}

/// One entry, and its directory to descend into. None when it is gone. Leaves its path in `path`.
fn look(
    level: &Level,
    path: &mut Vec<u8>,
    name: &[u8],
    recursive: bool,
) -> Result<Option<(FileInfo, Option<Dir>)>, Error> {
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    let failed = || Error::os::<Errno>("list", path);
    let dir = level.dir.fd().map_err(failed())?;
    let stat = match lstat(dir, name) {
        Err(Errno::NOENT) => return Ok(None),
        stat => stat.map_err(failed())?,
    };
    let file = info(path.clone(), &stat, target(dir, name, &stat));
    if !recursive || file.r#type() != FileType::Directory {
        return Ok(Some((file, None)));
    }
    let flags =
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let sub = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        // It was replaced since the stat, or permission is denied: listed, not entered.
        Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::ACCESS) => None,
        opened => Some(Dir::new(opened.map_err(failed())?).map_err(failed())?),
    };
    Ok(Some((file, sub)))
}

fn open(request: &ListFiles) -> Result<(Dir, Vec<u8>), Error> {
    let (dir, path) = open_dir("list", &request.root, &request.path, OFlags::RDONLY)?;
    let dir = Dir::new(dir).map_err(Error::os("list", &path))?;
    Ok((dir, path))
}
