//! Writes a file, atomically (temporary file and rename) or by append.
//!
//! A replaced file appears whole or not at all: its bytes go to a temporary file in the same directory,
//! which is renamed when the host has sent the end. An append writes as bytes
//! arrive; when it is cancelled, what arrived stays.

use super::resolve::{Options, Owner, Place, RACES_MAX, give_to};
use super::{owner, regular};
use crate::error::Error;
use crate::sys;
use k8e_wire::proto::{Done, WriteFile, input::Input, reply::Reply};
use k8e_wire::{CHUNK_BYTES, Requests};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// Permission bits of a new file.
const MODE: u32 = 0o644;

/// Permission bits that a request can set.
const MODE_MASK: u32 = 0o7777;

/// A temporary file that is removed on drop unless it was renamed.
struct Temporary<'a> {
    place: &'a Place,
    name: String,
    kept: bool,
}

// === impl Temporary ===

impl<'a> Temporary<'a> {
    fn create(place: &'a Place) -> Result<(Self, OwnedFd), Error> {
        let random = sys::random().map_err(Error::os("write", &place.path))?;
        let name = format!(".k8e-tmp-{random:016x}");
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&place.dir, name.as_str(), flags, Mode::from_raw_mode(0o600))
            .map_err(Error::os("write", &place.path))?;
        Ok((
            Self {
                place,
                name,
                kept: false,
            },
            file,
        ))
    }

    /// Renames it to the final name, replacing an existing file.
    fn keep(mut self) -> Result<(), Error> {
        rustix::fs::renameat(
            &self.place.dir,
            self.name.as_str(),
            &self.place.dir,
            self.place.name()?,
        )
        .map_err(Error::os("write", &self.place.path))?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.kept {
            let _ = rustix::fs::unlinkat(&self.place.dir, self.name.as_str(), AtFlags::empty());
        }
    }
}

/// Writes the input; the final reply has the number of bytes.
pub(crate) async fn write(requests: &mut Requests, request: WriteFile) -> Result<Reply, Error> {
    let bytes = if request.append {
        let (file, path) = open_to_append(&request)?;
        copy(requests, &file, &path).await?
    } else {
        replace(requests, &request).await?
    };
    Ok(Reply::Done(Done {
        bytes,
        truncated: false,
    }))
}

async fn replace(requests: &mut Requests, request: &WriteFile) -> Result<u64, Error> {
    let owner = owner(&request.user)?;
    let place = find(request, owner)?;
    let (temporary, file) = Temporary::create(&place)?;
    let bytes = copy(requests, &file, &place.path).await?;
    let failed = || Error::os::<Errno>("write", &place.path);
    let mut mode = request.mode & MODE_MASK;
    if let Some(old) = &place.stat {
        // If chown fails, the file belongs to the guest's user; that is no error.
        let _ = rustix::fs::fchown(
            &file,
            Some(Uid::from_raw(old.st_uid)),
            Some(Gid::from_raw(old.st_gid)),
        );
        mode = if mode == 0 {
            old.st_mode & MODE_MASK
        } else {
            mode
        };
    }
    let mode = if mode == 0 && place.stat.is_none() {
        MODE
    } else {
        mode
    };
    if let Some(Owner { uid, gid }) = owner {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::fs::fchown(&file, Some(uid), Some(gid)).map_err(failed())?;
    }
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(failed())?;
    temporary.keep()?;
    Ok(bytes)
}

fn open_to_append(request: &WriteFile) -> Result<(OwnedFd, Vec<u8>), Error> {
    let owner = owner(&request.user)?;
    for _ in 0..RACES_MAX {
        let place = find(request, owner)?;
        let mode = request.mode & MODE_MASK;
        let opened = match place.stat {
            Some(_) => place.open(OFlags::WRONLY | OFlags::APPEND),
            None => {
                let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL;
                let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&place.dir, place.name()?, flags, Mode::from_raw_mode(MODE))
            }
        };
        let file = match opened {
            // It was replaced since the stat.
            Err(Errno::LOOP | Errno::NOENT | Errno::EXIST) => continue,
            opened => opened.map_err(Error::os("append to", &place.path))?,
        };
        let stat = rustix::fs::fstat(&file).map_err(Error::os("stat", &place.path))?;
        regular(&place.path, &stat)?;
        if place.stat.is_none() {
            give_to(&place.dir, place.name()?, owner).map_err(Error::os("chown", &place.path))?;
        }
        if mode != 0 {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))
                .map_err(Error::os("chmod", &place.path))?;
        }
        return Ok((file, place.path));
    }
    Err(Error::os("append to", &request.path)(Errno::BUSY))
}

fn find(request: &WriteFile, owner: Option<Owner>) -> Result<Place, Error> {
    let place = Place::find(
        &request.root,
        &request.path,
        Options {
            follow: true,
            make_parents: true,
            owner,
        },
    )?;
    if let Some(stat) = &place.stat {
        regular(&place.path, stat)?;
    }
    place.name()?;
    Ok(place)
}

/// Writes inputs until their end.
async fn copy(requests: &mut Requests, file: &OwnedFd, path: &[u8]) -> Result<u64, Error> {
    let mut bytes = 0;
    loop {
        match requests.input().await? {
            Some(Input::Data(data)) => {
                for chunk in data.chunks(CHUNK_BYTES) {
                    write_all(file, chunk).map_err(Error::os("write", path))?;
                    bytes += chunk.len() as u64;
                    tokio::task::yield_now().await;
                }
            }
            Some(Input::End(_)) => return Ok(bytes),
            Some(
                Input::Signal(_)
                | Input::TreeWants(_)
                | Input::TreeEntries(_)
                | Input::TreePieces(_),
            ) => {
                return Err(Error::Invalid("writing a file takes only data".to_owned()));
            }
            None => return Err(Error::Cancelled),
        }
    }
}

fn write_all(file: &OwnedFd, mut data: &[u8]) -> Result<(), Errno> {
    while !data.is_empty() {
        match rustix::io::write(file, data) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => data = &data[written..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
