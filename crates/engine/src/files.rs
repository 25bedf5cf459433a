//! Files of a session's workspace: read, write, list, stat, make, move, remove. Streamed, byte-exact.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

mod stream;

pub use stream::{FileLister, FileReader, FileWriter};

use crate::guest::{FILES_LISTED_MAX, LISTING_TIMEOUT, checked_info, workspace};
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{GuestPath, Principal, SessionId, WORKSPACE};
use k8e_wire::proto::{self, reply, request};

/// Which part of a file to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileRange {
    /// From here.
    pub offset: u64,
    /// This many bytes; 0 is to the end.
    pub length: u64,
}

/// How to write a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// At the end of what is there, instead of in its place.
    pub append: bool,
    /// Permission bits; 0 keeps those of an existing file, or is 0644.
    pub mode: u32,
}

/// What to list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// Everything below, not only the directory's own entries.
    pub recursive: bool,
    /// Only entries modified at or after this time; 0 is all.
    pub since_unix_s: i64,
}

/// What a name in a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A socket, a pipe, a device.
    Other,
}

/// One file, as its guest describes it; sizes and names are checked, truth is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Absolute, below the workspace.
    pub path: Bytes,
    /// What it is.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Its owner inside.
    pub uid: u32,
    /// Its group inside.
    pub gid: u32,
    /// Last change of its content.
    pub mtime_unix_ns: i64,
    /// Of a symbolic link; else empty.
    pub symlink_target: Bytes,
}

// === impl FileKind ===

impl FileKind {
    /// As it is written in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symlink",
            Self::Other => "other",
        }
    }
}

// === impl Sessions ===

impl Sessions {
    /// Reads a file, or a part of it.
    pub async fn read_file(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        range: FileRange,
    ) -> Result<FileReader, Error> {
        let request = proto::ReadFile {
            root: workspace(),
            path: raw(path),
            offset: range.offset,
            length: range.length,
        };
        let mut call = self
            .call(
                who,
                id,
                request::Call::ReadFile(request),
                shown("read", path),
            )
            .await?;
        match call.reply().await? {
            reply::Reply::File(info) => {
                let info = checked_info(info).map_err(|what| call.misbehaved(what))?;
                Ok(FileReader {
                    info,
                    call,
                    wanted: (range.length > 0).then_some(range.length),
                    empties: 0,
                    done: false,
                })
            }
            _ => Err(call.misbehaved("it answered a read without the file's description")),
        }
    }

    /// Starts writing a file. It appears whole when finished, or not at all.
    pub async fn write_file(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        options: WriteOptions,
    ) -> Result<FileWriter, Error> {
        let request = proto::WriteFile {
            root: Bytes::from_static(path.root().as_bytes()),
            path: raw(path),
            append: options.append,
            mode: options.mode & 0o7777,
        };
        let audit = self.audited(who, "file.write", &object(id, path));
        let call = request::Call::WriteFile(request);
        match self.call(who, id, call, shown("write", path)).await {
            Ok(call) => Ok(FileWriter {
                call,
                bytes: 0,
                audit,
            }),
            Err(error) => audit.end(Err(error)),
        }
    }

    /// Lists a directory.
    pub async fn list_files(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        options: ListOptions,
    ) -> Result<FileLister, Error> {
        let request = proto::ListFiles {
            root: workspace(),
            path: raw(path),
            recursive: options.recursive,
            since_unix_s: options.since_unix_s,
            entries_max: FILES_LISTED_MAX,
        };
        let call = self
            .call(
                who,
                id,
                request::Call::ListFiles(request),
                shown("list", path),
            )
            .await?;
        Ok(FileLister {
            call,
            listed: 0,
            empties: 0,
            time_left: LISTING_TIMEOUT,
            truncated: false,
            done: false,
        })
    }

    /// Describes one file; a symbolic link is not followed.
    pub async fn stat(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
    ) -> Result<FileInfo, Error> {
        let request = proto::Stat {
            root: workspace(),
            path: raw(path),
            follow: false,
        };
        let mut call = self
            .call(who, id, request::Call::Stat(request), shown("stat", path))
            .await?;
        match call.reply().await? {
            reply::Reply::File(info) => checked_info(info).map_err(|what| call.misbehaved(what)),
            _ => Err(call.misbehaved("it answered a stat with something else")),
        }
    }

    /// Makes a directory; with `parents` also those above it, and one that exists is no error. Mode 0 is 0755.
    pub async fn make_dir(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        parents: bool,
        mode: u32,
    ) -> Result<(), Error> {
        let request = proto::MakeDir {
            root: workspace(),
            path: raw(path),
            parents,
            mode: mode & 0o7777,
        };
        let audit = self.audited(who, "file.mkdir", &object(id, path));
        let call = request::Call::MakeDir(request);
        audit.end(
            self.simple(who, id, call, shown("make directory", path))
                .await,
        )
    }

    /// Moves a file or directory.
    pub async fn move_file(
        &self,
        who: &Principal,
        id: &SessionId,
        from: &GuestPath,
        to: &GuestPath,
    ) -> Result<(), Error> {
        let request = proto::Move {
            root: workspace(),
            from: raw(from),
            to: raw(to),
        };
        let audit = self.audited(who, "file.move", &object(id, from));
        let call = request::Call::Move(request);
        audit.end(self.simple(who, id, call, shown("move", from)).await)
    }

    /// Removes a file, or with `recursive` a directory and everything below.
    pub async fn remove_file(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        recursive: bool,
    ) -> Result<(), Error> {
        let request = proto::Remove {
            root: workspace(),
            path: raw(path),
            recursive,
        };
        let audit = self.audited(who, "file.remove", &object(id, path));
        let call = request::Call::Remove(request);
        audit.end(self.simple(who, id, call, shown("remove", path)).await)
    }

    async fn simple(
        &self,
        who: &Principal,
        id: &SessionId,
        call: request::Call,
        what: String,
    ) -> Result<(), Error> {
        let mut call = self.call(who, id, call, what).await?;
        match call.reply().await? {
            reply::Reply::Done(_) => Ok(()),
            _ => Err(call.misbehaved("it answered with something else than done")),
        }
    }
}

fn raw(path: &GuestPath) -> Bytes {
    Bytes::copy_from_slice(path.as_bytes())
}

/// A file, for the audit: relative to the workspace, or absolute.
fn object(id: &SessionId, path: &GuestPath) -> String {
    let shown = path.as_bytes().escape_ascii();
    match path.root() {
        WORKSPACE => format!("{id}:{shown}"),
        root => format!("{id}:{root}/{shown}"),
    }
}

/// What is being done, for error messages.
fn shown(operation: &str, path: &GuestPath) -> String {
    const SHOWN_BYTES_MAX: usize = 256;
    let bytes = path.as_bytes();
    format!(
        "{operation} {}/{}",
        path.root(),
        bytes[..bytes.len().min(SHOWN_BYTES_MAX)].escape_ascii()
    )
}
