//! The tree of a workspace, between its guest and the chunk store. What the guest sends is data with bounds; chunks are
//! made, and read, in a thread of their own.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::{Held, blocking};
use crate::guest::{Call, workspace};
use crate::{Error, Sessions};
use k8e_model::{Principal, SessionId};
use k8e_snapshot::{
    Entry, Kind, Known, Meta, Pass, Piece, Root, SnapshotError, Step, Xattr, restore,
};
use k8e_wire::proto::{self, input, reply, request};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Messages between a guest's connection and the thread that makes chunks: 2 MiB.
const WORK_MAX: usize = 8;

/// Entries of one message of a guest.
pub(super) const BATCH_MAX: usize = 256;

/// Until a guest has stopped its processes and written back its files; and until it has removed a tree that was
/// replaced.
pub(super) const SLOW_TIMEOUT: Duration = Duration::from_secs(300);

/// What a file system can hold beside its size in data: inline data, compressed blocks.
pub(super) const DISK_SLACK_BYTES: u64 = 256 * 1024 * 1024;

/// A tree that was saved.
pub(super) struct SavedTree {
    pub(super) root: Root,
    pub(super) digest: String,
    pub(super) stopped: Duration,
    pub(super) skipped: u64,
}

/// For the thread that makes chunks.
enum Work {
    Batch(Vec<Entry>, oneshot::Sender<Vec<bool>>),
    Pieces(Vec<proto::TreePiece>),
}

/// One walk over the tree.
struct Walked {
    held: Held,
    pass: Pass,
    done: proto::TreeDone,
}

// === impl Sessions ===

impl Sessions {
    /// Saves the tree: first while its processes run, where the guest can tell what changed since; then the rest of it
    /// while they are stopped.
    pub(super) async fn save_tree(
        &self,
        who: &Principal,
        id: &SessionId,
        held: Held,
        known: Known,
        disk_bytes: u64,
        meta: &Meta,
    ) -> Result<(Held, SavedTree), Error> {
        let bytes_max = disk_bytes.saturating_add(DISK_SLACK_BYTES);
        let (call, begun) = self.begin_walk(who, id, false).await?;
        let (held, known, before) = match begun.ctimes {
            true => {
                let before = begun.now_unix_ns;
                let walked = walk(call, held, Pass::new(known, false, before), bytes_max).await?;
                let Walked { mut held, pass, .. } = walked;
                let (held, known) = blocking(move || {
                    let known = pass.finish(&mut held.owner)?;
                    Ok((held, known))
                })
                .await?;
                (held, known, before)
            }
            // Nothing can be told from change times: one walk, and nothing of it is of use for the next.
            false => {
                drop(call);
                (held, Known::default(), i64::MIN)
            }
        };
        let (call, _) = self.begin_walk(who, id, true).await?;
        let walked = walk(call, held, Pass::new(known, true, before), bytes_max).await?;
        let Walked {
            mut held,
            pass,
            done,
        } = walked;
        let meta = meta.clone();
        let (held, root, digest) = blocking(move || {
            let (root, digest) = pass.finish_snapshot(&mut held.owner, &meta)?;
            Ok((held, root, digest))
        })
        .await?;
        let tree = SavedTree {
            root,
            digest,
            stopped: Duration::from_micros(done.stopped_us),
            skipped: done.skipped,
        };
        Ok((held, tree))
    }

    async fn begin_walk(
        &self,
        who: &Principal,
        id: &SessionId,
        stop: bool,
    ) -> Result<(Call, proto::TreeBegun), Error> {
        let request = request::Call::SaveTree(proto::SaveTree {
            root: workspace(),
            stop,
        });
        let what = "save the workspace".to_owned();
        let mut call = self.call(who, id, request, what).await?;
        match call.slow_reply(SLOW_TIMEOUT).await? {
            reply::Reply::TreeBegun(begun) => Ok((call, begun)),
            _ => Err(call.misbehaved("it did not begin to send its files")),
        }
    }

    /// Sends a snapshot to a guest, which puts it in the place of its workspace. Returns how long processes were
    /// stopped.
    pub(super) async fn restore_tree(
        &self,
        who: &Principal,
        id: &SessionId,
        held: Held,
        digest: &str,
    ) -> Result<Duration, Error> {
        let (steps, mut coming) = mpsc::channel(WORK_MAX);
        let digest = digest.to_owned();
        let reading = tokio::task::spawn_blocking(move || {
            let mut held = held;
            let root = Root::decode_checked(&held.owner.root(&digest)?)?;
            restore(&mut held.owner, &root, |step| {
                let gone = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
                steps
                    .blocking_send(step)
                    .map_err(|_| SnapshotError::Source(gone()))
            })
        });
        let request = request::Call::RestoreTree(proto::RestoreTree { root: workspace() });
        let what = "restore the workspace".to_owned();
        let mut call = self.call(who, id, request, what).await?;
        while let Some(step) = coming.recv().await {
            call.send(input_of(step)).await?;
        }
        // Before the end is sent: a snapshot that cannot be read whole replaces nothing.
        reading.await.map_err(|_| Error::Stopping)??;
        call.send(input::Input::End(proto::End {})).await?;
        match call.slow_reply(SLOW_TIMEOUT).await? {
            reply::Reply::TreeDone(done) => Ok(Duration::from_micros(done.stopped_us)),
            _ => Err(call.misbehaved("it answered a restored tree with something else")),
        }
    }
}

/// Takes a tree from a guest.
async fn walk(mut call: Call, held: Held, pass: Pass, bytes_max: u64) -> Result<Walked, Error> {
    let (work, todo) = mpsc::channel(WORK_MAX);
    let working = tokio::task::spawn_blocking(move || make_chunks(held, pass, todo));
    let done = receive(&mut call, &work, bytes_max).await;
    drop(work);
    // The thread's error is the cause where there are two: the other is that nobody takes any more.
    let (held, pass) = working.await.map_err(|_| Error::Stopping)??;
    Ok(Walked {
        held,
        pass,
        done: done?,
    })
}

async fn receive(
    call: &mut Call,
    work: &mpsc::Sender<Work>,
    bytes_max: u64,
) -> Result<proto::TreeDone, Error> {
    let (mut bytes, mut empties) = (0u64, 0);
    loop {
        match call.reply().await? {
            reply::Reply::TreeEntries(batch) => {
                if batch.entries.is_empty() || batch.entries.len() > BATCH_MAX {
                    return Err(call.misbehaved("it sent a batch of files of an impossible size"));
                }
                let entries = batch.entries.into_iter().map(entry_of).collect();
                let (wants, wanted) = oneshot::channel();
                if work.send(Work::Batch(entries, wants)).await.is_err() {
                    return Err(Error::Stopping);
                }
                let wanted = wanted.await.map_err(|_| Error::Stopping)?;
                let wanted: Vec<u8> = wanted.into_iter().map(u8::from).collect();
                let wants = proto::TreeWants {
                    wanted: wanted.into(),
                };
                call.send(input::Input::TreeWants(wants)).await?;
            }
            reply::Reply::TreePieces(pieces) if pieces.pieces.is_empty() => {
                call.count_empty(&mut empties)?;
            }
            reply::Reply::TreePieces(pieces) => {
                let sent = pieces.pieces.iter().map(|piece| piece.data.len() as u64);
                bytes = bytes.saturating_add(sent.sum());
                if bytes > bytes_max {
                    return Err(call.misbehaved("it sent more than its disk can hold"));
                }
                if work.send(Work::Pieces(pieces.pieces)).await.is_err() {
                    return Err(Error::Stopping);
                }
            }
            reply::Reply::TreeDone(done) => return Ok(done),
            _ => return Err(call.misbehaved("it sent something else than its files")),
        }
    }
}

fn make_chunks(
    mut held: Held,
    mut pass: Pass,
    mut todo: mpsc::Receiver<Work>,
) -> Result<(Held, Pass), SnapshotError> {
    while let Some(work) = todo.blocking_recv() {
        match work {
            Work::Batch(entries, wants) => {
                let wanted = pass.batch(&mut held.owner, entries)?;
                // Gone when the call has ended; so has this then.
                let _ = wants.send(wanted);
            }
            Work::Pieces(pieces) => {
                for piece in pieces {
                    let index = piece.index as usize;
                    pass.piece(&mut held.owner, index, piece.offset, &piece.data, piece.end)?;
                }
            }
        }
    }
    Ok((held, pass))
}

/// Bytes are copied: a slice would keep the whole frame alive.
pub(super) fn entry_of(entry: proto::TreeEntry) -> Entry {
    let own = |bytes: &bytes::Bytes| bytes::Bytes::copy_from_slice(bytes);
    let xattrs = entry.xattrs.iter().map(|xattr| Xattr {
        name: own(&xattr.name),
        value: own(&xattr.value),
    });
    Entry {
        path: own(&entry.path),
        kind: match entry.kind() {
            proto::TreeKind::File => Kind::File,
            proto::TreeKind::Directory => Kind::Directory,
            proto::TreeKind::Symlink => Kind::Symlink,
            proto::TreeKind::HardLink => Kind::HardLink,
            proto::TreeKind::Fifo => Kind::Fifo,
            proto::TreeKind::Unspecified => Kind::Unspecified,
        }
        .into(),
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime_ns: entry.mtime_unix_ns,
        size: entry.size,
        target: own(&entry.target),
        xattrs: xattrs.collect(),
        content: Vec::new(),
        ino: entry.ino,
        ctime_ns: entry.ctime_unix_ns,
    }
}

fn input_of(step: Step) -> input::Input {
    match step {
        Step::Entries(entries) => input::Input::TreeEntries(proto::TreeEntries {
            entries: entries.into_iter().map(proto_of).collect(),
        }),
        Step::Pieces(pieces) => {
            let pieces = pieces.into_iter().map(|piece: Piece| proto::TreePiece {
                index: u32::try_from(piece.index).unwrap_or(u32::MAX),
                offset: piece.offset,
                data: piece.data,
                end: None,
            });
            input::Input::TreePieces(proto::TreePieces {
                pieces: pieces.collect(),
            })
        }
    }
}

pub(super) fn proto_of(entry: Entry) -> proto::TreeEntry {
    let kind = match entry.kind() {
        Kind::File => proto::TreeKind::File,
        Kind::Directory => proto::TreeKind::Directory,
        Kind::Symlink => proto::TreeKind::Symlink,
        Kind::HardLink => proto::TreeKind::HardLink,
        Kind::Fifo => proto::TreeKind::Fifo,
        Kind::Unspecified => proto::TreeKind::Unspecified,
    };
    let xattrs = entry.xattrs.into_iter().map(|xattr| proto::TreeXattr {
        name: xattr.name,
        value: xattr.value,
    });
    proto::TreeEntry {
        path: entry.path,
        kind: kind.into(),
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime_unix_ns: entry.mtime_ns,
        ctime_unix_ns: 0,
        ino: 0,
        size: entry.size,
        target: entry.target,
        xattrs: xattrs.collect(),
    }
}
