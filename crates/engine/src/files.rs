//! File calls on a session's workspace: read, write, list, stat, mkdir, move, remove. Streamed, byte-exact.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

mod stream;

pub use stream::{FileLister, FileReader, FileWriter};

use crate::guest::{FILES_LISTED_MAX, LISTING_TIMEOUT, checked_info};
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{GuestPath, Principal, SessionId, WORKSPACE};
use k8e_wire::proto::{self, reply, request};

/// Byte range of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes; 0 is to the end.
    pub length: u64,
}

/// How to write a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Append to an existing file instead of replacing it.
    pub append: bool,
    /// Permission bits; 0 keeps those of an existing file, or is 0644.
    pub mode: u32,
    /// Owner of the file and of directories that are made for it; none is root, or the owner of an existing file.
    pub owner: Option<FileOwner>,
}

/// Owner of what a file call makes: the users that every sandbox has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOwner {
    /// `root`.
    Root,
    /// `user`, which is not privileged.
    User,
}

/// Options of a directory listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    /// Recursive, instead of only the directory's own entries.
    pub recursive: bool,
    /// Only entries modified at or after this time; 0 is all.
    pub since_unix_s: i64,
    /// Levels of a recursive listing: 1 is the directory's own entries; 0 is all.
    pub depth: u32,
}

/// File type of a directory entry.
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

/// Metadata of a file, as its guest reports it: validated, but not trustworthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Absolute, below the root of the path that was asked for.
    pub path: Bytes,
    /// File type.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// User id inside the sandbox.
    pub uid: u32,
    /// Group id inside the sandbox.
    pub gid: u32,
    /// Modification time.
    pub mtime_unix_ns: i64,
    /// Target of a symbolic link; else empty.
    pub symlink_target: Bytes,
}

// === impl FileKind ===

impl FileKind {
    /// Name in replies.
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
            root: root(path),
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
                let info = checked_info(info, path.root()).map_err(|what| call.misbehaved(what))?;
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

    /// Starts an atomic write of a file: it appears whole when finished, or not at all.
    pub async fn write_file(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        options: WriteOptions,
    ) -> Result<FileWriter, Error> {
        let request = proto::WriteFile {
            root: root(path),
            path: raw(path),
            append: options.append,
            mode: options.mode & 0o7777,
            user: name_of(options.owner),
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
            root: root(path),
            path: raw(path),
            recursive: options.recursive,
            since_unix_s: options.since_unix_s,
            entries_max: FILES_LISTED_MAX,
            depth: options.depth,
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
            root: path.root(),
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
        self.stat_call(who, id, path, false).await
    }

    /// Describes what a path leads to, through symbolic links.
    pub async fn stat_target(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
    ) -> Result<FileInfo, Error> {
        self.stat_call(who, id, path, true).await
    }

    async fn stat_call(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        follow: bool,
    ) -> Result<FileInfo, Error> {
        let request = proto::Stat {
            root: root(path),
            path: raw(path),
            follow,
        };
        let mut call = self
            .call(who, id, request::Call::Stat(request), shown("stat", path))
            .await?;
        match call.reply().await? {
            reply::Reply::File(info) => {
                checked_info(info, path.root()).map_err(|what| call.misbehaved(what))
            }
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
        self.make_dir_of(who, id, path, (parents, mode), None).await
    }

    /// The same with the owner of the directories that are made, `parents` included.
    pub async fn make_dir_of(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        (parents, mode): (bool, u32),
        owner: Option<FileOwner>,
    ) -> Result<(), Error> {
        let request = proto::MakeDir {
            root: root(path),
            path: raw(path),
            parents,
            mode: mode & 0o7777,
            user: name_of(owner),
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
        self.move_call(who, id, (from, to), None).await
    }

    /// The same; directories above the destination are made, for this owner.
    pub async fn move_file_making_dirs(
        &self,
        who: &Principal,
        id: &SessionId,
        from: &GuestPath,
        to: &GuestPath,
        owner: FileOwner,
    ) -> Result<(), Error> {
        self.move_call(who, id, (from, to), Some(owner)).await
    }

    async fn move_call(
        &self,
        who: &Principal,
        id: &SessionId,
        (from, to): (&GuestPath, &GuestPath),
        make_dirs_for: Option<FileOwner>,
    ) -> Result<(), Error> {
        let request = proto::Move {
            root: root(from),
            from: raw(from),
            to: raw(to),
            parents: make_dirs_for.is_some(),
            user: name_of(make_dirs_for),
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
            root: root(path),
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

pub(crate) fn root(path: &GuestPath) -> Bytes {
    Bytes::from_static(path.root().as_bytes())
}

/// As in the guest's requests.
fn name_of(owner: Option<FileOwner>) -> String {
    let name = match owner {
        None => "",
        Some(FileOwner::Root) => "root",
        Some(FileOwner::User) => "user",
    };
    name.to_owned()
}

pub(crate) fn raw(path: &GuestPath) -> Bytes {
    Bytes::copy_from_slice(path.as_bytes())
}

/// Object name of a file in the audit log: relative to the workspace, or absolute.
fn object(id: &SessionId, path: &GuestPath) -> String {
    let shown = path.as_bytes().escape_ascii();
    match path.root() {
        WORKSPACE => format!("{id}:{shown}"),
        "/" => format!("{id}:/{shown}"),
        root => format!("{id}:{root}/{shown}"),
    }
}

/// Operation and path, for error messages.
pub(crate) fn shown(operation: &str, path: &GuestPath) -> String {
    const SHOWN_BYTES_MAX: usize = 256;
    let bytes = path.as_bytes();
    format!(
        "{operation} {}/{}",
        path.root(),
        bytes[..bytes.len().min(SHOWN_BYTES_MAX)].escape_ascii()
    )
}
