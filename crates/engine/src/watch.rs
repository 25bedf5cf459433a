//! File watching: a stream of changes in a directory of a session, as its guest reports them.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use crate::files::{raw, root, shown};
use crate::guest::{Call, WATCH_START_TIMEOUT, broken};
use crate::live::left_active;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{GuestPath, Principal, SessionId};
use k8e_wire::proto::{self, reply, request};

/// Bytes of a path that a guest reports; a correct one reports no longer ones.
const PATH_BYTES_MAX: usize = 8 * 1024;

/// A change in a watched directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEvent {
    /// What happened.
    pub change: FileChange,
    /// Path relative to the watched directory; empty for an overflow. Validated, but not trustworthy.
    pub path: Bytes,
    /// Whether it is a directory.
    pub directory: bool,
    /// The same in both halves of a rename; else 0.
    pub rename_id: u32,
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    /// It was made.
    Created,
    /// Its content changed.
    Written,
    /// It was removed.
    Removed,
    /// It was renamed from this path; without a [`FileChange::RenamedTo`], to one that is not watched.
    RenamedFrom,
    /// It was renamed to this path; without a [`FileChange::RenamedFrom`], from one that is not watched.
    RenamedTo,
    /// Permissions, owner, times or extended attributes changed.
    Attributes,
    /// Events were lost at this point: they came faster than they were read.
    Overflow,
}

/// Changes in a directory from now on. Dropping it ends the watch.
#[derive(Debug)]
pub struct FileWatch {
    call: Call,
    empties: u32,
}

// === impl FileChange ===

impl FileChange {
    /// Name in replies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "create",
            Self::Written => "write",
            Self::Removed => "remove",
            Self::RenamedFrom => "rename_from",
            Self::RenamedTo => "rename_to",
            Self::Attributes => "chmod",
            Self::Overflow => "overflow",
        }
    }
}

// === impl Sessions ===

impl Sessions {
    /// Watches a directory, and with `recursive` all below it. When this returns, changes are reported.
    pub async fn watch_files(
        &self,
        who: &Principal,
        id: &SessionId,
        path: &GuestPath,
        recursive: bool,
    ) -> Result<FileWatch, Error> {
        let request = proto::WatchFiles {
            root: root(path),
            path: raw(path),
            recursive,
        };
        let request = request::Call::WatchFiles(request);
        let mut call = self.call(who, id, request, shown("watch", path)).await?;
        match call.slow_reply(WATCH_START_TIMEOUT).await? {
            reply::Reply::Watching(_) => Ok(FileWatch { call, empties: 0 }),
            _ => Err(call.misbehaved("it answered a watch with something else")),
        }
    }
}

// === impl FileWatch ===

impl FileWatch {
    /// The next changes, at least one. Fails when the session ends, or the directory is removed. Cancel safe.
    pub async fn next(&mut self) -> Result<Vec<FileEvent>, Error> {
        loop {
            // No timeout: nothing may change for days.
            let reply = tokio::select! {
                biased;
                () = left_active(&mut self.call.phases) => return Err(self.call.used.live.gone()),
                reply = self.call.replies.next() => reply,
            };
            let list = match reply {
                Ok(reply::Reply::FileEvents(list)) => list,
                Ok(reply::Reply::Error(error)) => return Err(self.call.refused(&error)),
                Ok(_) => return Err(self.call.misbehaved("it sent something else than changes")),
                Err(e) => return Err(broken(&self.call.used, &mut self.call.phases, &e).await),
            };
            if list.events.is_empty() {
                self.call.count_empty(&mut self.empties)?;
                continue;
            }
            let events = list.events.iter().map(checked);
            let events: Result<Vec<FileEvent>, _> = events.collect();
            return events.map_err(|what| self.call.misbehaved(what));
        }
    }
}

/// Validates a change: a client may join its path to a directory of its own.
///
/// Bytes are copied: a slice would keep the whole frame alive.
fn checked(event: &proto::FileEvent) -> Result<FileEvent, &'static str> {
    let change = match proto::FileChange::try_from(event.change) {
        Ok(proto::FileChange::Created) => FileChange::Created,
        Ok(proto::FileChange::Written) => FileChange::Written,
        Ok(proto::FileChange::Removed) => FileChange::Removed,
        Ok(proto::FileChange::MovedFrom) => FileChange::RenamedFrom,
        Ok(proto::FileChange::MovedTo) => FileChange::RenamedTo,
        Ok(proto::FileChange::Attributes) => FileChange::Attributes,
        Ok(proto::FileChange::Overflow) => FileChange::Overflow,
        Ok(proto::FileChange::Unspecified) | Err(_) => return Err("it reported an unknown change"),
    };
    let path = &event.path;
    let mut parts = path.split(|byte| *byte == b'/');
    let impossible = match change {
        FileChange::Overflow => !path.is_empty(),
        _ => parts.any(|part| matches!(part, b"" | b"." | b"..")),
    };
    if impossible || path.contains(&0) || path.len() > PATH_BYTES_MAX {
        return Err("it reported a change with an impossible path");
    }
    Ok(FileEvent {
        change,
        path: Bytes::copy_from_slice(path),
        directory: event.directory,
        rename_id: event.move_id,
    })
}
