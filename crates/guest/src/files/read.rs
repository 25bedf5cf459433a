//! Reads a file.

use super::resolve::{Options, Place, RACES_MAX};
use super::{info, regular};
use crate::error::Error;
use k8e_wire::proto::{Done, ReadFile, reply::Reply};
use k8e_wire::{CHUNK_BYTES, ReplySink};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// Sends `FileInfo`, then the bytes; the final reply counts them.
///
/// A file with a size is read up to the size it had when it was opened, so that one that grows
/// without end ends. One without (as in `/proc`) is read to its end.
pub(crate) async fn read(replies: &mut ReplySink, request: ReadFile) -> Result<Reply, Error> {
    let (file, stat, path) = open(&request.root, &request.path)?;
    let size = stat.st_size.unsigned_abs();
    replies
        .send(Reply::File(info(path.clone(), &stat, Vec::new())))
        .await?;
    let mut left = if request.length == 0 {
        u64::MAX
    } else {
        request.length
    };
    if size > 0 {
        left = left.min(size.saturating_sub(request.offset));
    }
    let mut offset = request.offset;
    let mut buffer = vec![0; CHUNK_BYTES];
    while left > 0 {
        let want = usize::try_from(left)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        let read = match rustix::io::pread(&file, &mut buffer[..want], offset) {
            Err(Errno::INTR) => continue,
            // An offset beyond the kernel's maximum is beyond the end as well.
            Err(Errno::INVAL) if i64::try_from(offset).is_err() => 0,
            read => read.map_err(Error::os("read", &path))?,
        };
        if read == 0 {
            break;
        }
        replies
            .send(Reply::Data(bytes::Bytes::copy_from_slice(&buffer[..read])))
            .await?;
        offset += read as u64;
        left -= read as u64;
        tokio::task::yield_now().await;
    }
    Ok(Reply::Done(Done {
        bytes: offset - request.offset,
        truncated: false,
    }))
}

fn open(root: &[u8], path: &[u8]) -> Result<(OwnedFd, Stat, Vec<u8>), Error> {
    for _ in 0..RACES_MAX {
        let place = Place::find(
            root,
            path,
            Options {
                follow: true,
                ..Options::default()
            },
        )?;
        // stat before opening: opening a device can have effects.
        regular(&place.path, place.existing()?)?;
        match place.open(OFlags::RDONLY) {
            // It was replaced by a symbolic link, or removed, since the stat.
            Err(Errno::LOOP | Errno::NOENT) => {}
            opened => {
                let file = opened.map_err(Error::os("open", &place.path))?;
                let stat = rustix::fs::fstat(&file).map_err(Error::os("stat", &place.path))?;
                regular(&place.path, &stat)?;
                return Ok((file, stat, place.path));
            }
        }
    }
    Err(Error::os("open", path)(Errno::BUSY))
}
