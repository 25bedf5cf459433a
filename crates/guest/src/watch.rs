//! `WatchFiles`: reports changes in a directory, and with `recursive` in all directories below it (inotify).
//!
//! The kernel's queue is read at once, also while the host is slow, into a bounded [queue](queue::Queue): gVisor's kernel
//! has no bound of its own. Changes that do not fit are reported as an overflow. A watch ends with its connection.

mod queue;
mod tree;

use crate::Guest;
use crate::error::Error;
use crate::sys;
use k8e_wire::ReplySink;
use k8e_wire::proto::{WatchFiles, Watching, reply::Reply};
use queue::Queue;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::unix::AsyncFd;
use tree::Tree;

/// Watches of one guest at a time. Each has an inotify instance, of which a user has 128 by default: the programs in the
/// sandbox need some too.
const WATCHES_MAX: usize = 32;

/// Bytes of one read of the kernel's queue: some hundred events, between two yields to other tasks.
const READ_BYTES: usize = 16 * 1024;

/// Numbers of watches and watched directories of a guest.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    watches: AtomicUsize,
    directories: AtomicUsize,
}

/// A watch, counted until it is dropped.
struct Slot<'a> {
    counts: &'a Counts,
    directories: usize,
}

/// An event as the kernel reports it.
struct Event {
    /// Watch descriptor: which directory.
    wd: i32,
    flags: ReadFlags,
    /// The same in both halves of a rename.
    cookie: u32,
    /// Name in the directory; empty when it is about the directory itself.
    name: Vec<u8>,
}

struct Watch<'a> {
    inotify: AsyncFd<OwnedFd>,
    tree: Tree<'a>,
    queue: Queue,
    /// Why it ended; what is queued is sent before.
    ended: Option<Error>,
}

/// Reports changes until the host closes, or until the directory is gone.
pub(crate) async fn watch(
    guest: &Guest,
    replies: &mut ReplySink,
    request: WatchFiles,
) -> Result<Reply, Error> {
    let mut watch = Watch::new(&guest.watches, request)?;
    while watch.tree.is_scanning() && watch.ended.is_none() {
        watch.step().await;
    }
    if let Some(error) = watch.ended {
        return Err(error);
    }
    replies.send(Reply::Watching(Watching {})).await?;
    loop {
        while let Some(batch) = watch.queue.batch() {
            let mut sending = pin!(replies.send(Reply::FileEvents(batch)));
            loop {
                tokio::select! {
                    biased;
                    sent = &mut sending => {
                        sent?;
                        break;
                    }
                    () = watch.step() => {}
                }
            }
        }
        match watch.ended.take() {
            Some(error) => return Err(error),
            None => watch.step().await,
        }
    }
}

// === impl Watch ===

impl<'a> Watch<'a> {
    fn new(counts: &'a Counts, request: WatchFiles) -> Result<Self, Error> {
        let slot = Slot::new(counts)?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let inotify = inotify.map_err(|errno| match errno {
            Errno::MFILE | Errno::NFILE => Error::Exhausted(
                "the sandbox has no more inotify instances: end programs or watches that use them"
                    .to_owned(),
            ),
            errno => Error::os("watch", &request.path)(errno),
        })?;
        let tree = Tree::new(&inotify, slot, request)?;
        let inotify = sys::polled(inotify).map_err(Error::os("watch", b"inotify"))?;
        Ok(Self {
            inotify,
            tree,
            queue: Queue::default(),
            ended: None,
        })
    }

    /// Scans a part of a directory, or waits for events and handles some. Cancel safe.
    async fn step(&mut self) {
        if self.ended.is_some() {
            return std::future::pending().await;
        }
        let stepped = match self.tree.is_scanning() {
            true => {
                let scanned = self.tree.scan(self.inotify.get_ref(), &mut self.queue);
                tokio::task::yield_now().await;
                scanned
            }
            false => match self.read().await {
                Ok(events) if events.is_empty() => {
                    self.tree.drained(self.inotify.get_ref());
                    Ok(())
                }
                Ok(events) => events.into_iter().try_for_each(|event| {
                    self.tree
                        .handle(self.inotify.get_ref(), event, &mut self.queue)
                }),
                Err(error) => Err(error),
            },
        };
        if let Err(error) = stepped {
            self.ended = Some(error);
        }
    }

    /// Waits until the kernel has events; none when all have been read.
    async fn read(&self) -> Result<Vec<Event>, Error> {
        let failed = || Error::os("read", b"inotify");
        let mut guard = self.inotify.readable().await.map_err(failed())?;
        match guard.try_io(|inotify| read_events(inotify.get_ref())) {
            Ok(events) => events.map_err(failed()),
            Err(_would_block) => Ok(Vec::new()),
        }
    }
}

/// One read of the kernel's queue.
fn read_events(inotify: &OwnedFd) -> std::io::Result<Vec<Event>> {
    let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
    let mut reader = Reader::new(inotify, &mut buffer);
    let mut events = Vec::new();
    loop {
        let event = reader.next()?;
        events.push(Event {
            wd: event.wd(),
            flags: event.events(),
            cookie: event.cookie(),
            name: event
                .file_name()
                .map_or_else(Vec::new, |name| name.to_bytes().to_vec()),
        });
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}

// === impl Slot ===

impl<'a> Slot<'a> {
    fn new(counts: &'a Counts) -> Result<Self, Error> {
        let slot = Self {
            counts,
            directories: 0,
        };
        if counts.watches.fetch_add(1, Ordering::Relaxed) >= WATCHES_MAX {
            // Dropped: it does not count.
            return Err(Error::Exhausted(format!(
                "{WATCHES_MAX} directories are watched already: end a watch"
            )));
        }
        Ok(slot)
    }

    /// Counts a directory of this watch; returns the numbers of this watch and of all.
    fn add_directory(&mut self) -> (usize, usize) {
        self.directories += 1;
        let all = self.counts.directories.fetch_add(1, Ordering::Relaxed);
        (self.directories, all + 1)
    }

    fn remove_directory(&mut self) {
        self.directories -= 1;
        self.counts.directories.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.counts.watches.fetch_sub(1, Ordering::Relaxed);
        let directories = self.directories;
        self.counts
            .directories
            .fetch_sub(directories, Ordering::Relaxed);
    }
}
