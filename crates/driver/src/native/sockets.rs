//! Limit of the number of sockets of a native sandbox, by seccomp user notification.
//!
//! Not all socket memory is charged to the sandbox: netlink replies and reassembled datagrams
//! are not, on any kernel, and on cgroup v1 the kernel grants each TCP
//! connection some tens of kilobytes whatever the limit is. What one socket holds is bounded; the kernel
//! has no limit on their number. So seccomp suspends each call that makes one, until this process has read
//! how many there are and lets it continue: `socket`, but for Unix sockets, whose buffers are charged; and
//! `connect`, with which TCP makes another socket at the peer.
//!
//! It is one process for all sandboxes of a server, forked from the launcher before the first of them. It
//! has no capabilities and no open descriptors but those that a sandbox's first process sends: the seccomp
//! listener, the kernel's count of the sandbox's sockets, and its memory limit. It outlives its server as
//! sandboxes do, and ends with the last one. If it dies, `socket` fails in the sandboxes that it served.

mod sys;

use crate::DriverError;
use crate::local::cgroup::Join;
use crate::local::launcher::Channel;
use crate::local::sys::{self as local, Fork};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Lower bound of the memory that the kernel may hold per socket without charging it: the default
/// size of a receive buffer (this machine may have raised it) and its overhead.
const SOCKET_BYTES_MIN: u64 = 256 * 1024;
const RECEIVE_BUFFER: &str = "/proc/sys/net/core/rmem_default";

/// Socket limit of the smallest sandbox. The server's ends of its connections are counted too.
const SOCKETS_MIN: u64 = 512;

/// The kernel's socket counters of a network namespace.
const COUNTED: &str = "/proc/self/net/sockstat";

/// Bytes read of that file, and of one that holds a number.
const FILE_BYTES_MAX: usize = 1024;

/// epoll events per wake-up; more come with the next.
const EVENTS_MAX: usize = 64;

/// epoll key of the channel; those of sandboxes follow.
const CHANNEL: u64 = 0;

/// The launcher's end of the channel to the notification process.
#[derive(Debug)]
pub(crate) struct Sockets(Channel);

/// Files for counting the sockets of a sandbox, opened by its first process.
pub(crate) struct Count {
    counted: File,
    memory: File,
}

/// A sandbox in the notification process.
struct Sandbox {
    asks: OwnedFd,
    count: Count,
    socket_bytes: u64,
}

// === impl Sockets ===

impl Sockets {
    /// Forks the notification process. The caller must be single-threaded.
    pub(crate) fn start() -> Result<Self, DriverError> {
        let step = || DriverError::step::<io::Error>("start", "the process that counts sockets");
        let (theirs, ours) = Channel::pair().map_err(step())?;
        let ours = local::move_up(ours).map_err(step())?;
        match local::fork_into(0, None).map_err(step())? {
            Fork::Parent { .. } => Ok(Self(ours.into())),
            Fork::Child => {
                let done = local::close_others(theirs.as_fd()).and_then(|channel| {
                    give_up_powers()?;
                    serve(&Channel::from(channel))
                });
                local::exit_now(i32::from(done.is_err()))
            }
        }
    }

    /// Installs the filter on the calling process and its children. Needs `no_new_privs`.
    pub(super) fn count(&self, count: &Count) -> Result<(), DriverError> {
        let step = || DriverError::step::<io::Error>("limit", "the number of sockets");
        let asks = sys::ask_for_sockets().map_err(step())?;
        let fds = [asks.as_fd(), count.counted.as_fd(), count.memory.as_fd()];
        self.0.send(&(), &fds).map_err(step())
    }
}

// === impl Count ===

impl Count {
    /// In the sandbox's network namespace, while the host's file system is visible.
    pub(super) fn open(join: &Join) -> Result<Self, DriverError> {
        // Above the descriptors that the guest gets.
        let open = |path: &Path| {
            let opened = File::open(path).and_then(|file| local::move_up(file.into()));
            let opened = opened.map(File::from);
            opened.map_err(DriverError::step("open", path.display().to_string()))
        };
        Ok(Self {
            counted: open(COUNTED.as_ref())?,
            memory: open(&join.memory_limit())?,
        })
    }

    /// Whether there is room for one more. Concurrent threads may get one each.
    fn has_room(&self, socket_bytes: u64) -> io::Result<bool> {
        let counted = read(&self.counted)?;
        let used = counted
            .lines()
            .find_map(|line| line.strip_prefix("sockets: used "))
            .and_then(|used| used.trim().parse::<u64>().ok())
            .ok_or_else(|| io::Error::other("the kernel does not count sockets"))?;
        let memory: u64 = read(&self.memory)?
            .trim()
            .parse()
            .map_err(io::Error::other)?;
        Ok(used < sockets_max(memory, socket_bytes))
    }
}

/// Limit for a sandbox with this memory limit: uncharged socket memory is never more than as much again.
fn sockets_max(memory_bytes: u64, socket_bytes: u64) -> u64 {
    (memory_bytes / socket_bytes).max(SOCKETS_MIN)
}

/// Memory that this machine's kernel may hold for one socket.
fn socket_bytes() -> u64 {
    let buffer = fs::read_to_string(RECEIVE_BUFFER).unwrap_or_default();
    let buffer = buffer.trim().parse().unwrap_or(0);
    SOCKET_BYTES_MIN.max(buffer)
}

fn read(file: &File) -> io::Result<String> {
    let mut bytes = [0; FILE_BYTES_MAX];
    let length = file.read_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

fn give_up_powers() -> io::Result<()> {
    // Sandboxes that outlive the server need it: the OOM killer should choose others first.
    let _ = fs::write("/proc/self/oom_score_adj", "-500");
    // A separate session: no SIGINT or SIGHUP from the server's terminal.
    rustix::process::setsid()?;
    rustix::process::chdir("/")?;
    rustix::thread::set_name(c"k8e-sockets")?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Serves until the launcher and all sandboxes are gone.
fn serve(channel: &Channel) -> io::Result<()> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, channel, EventData::new_u64(CHANNEL), EventFlags::IN)?;
    let socket_bytes = socket_bytes();
    let (mut sandboxes, mut last, mut launcher) = (HashMap::new(), CHANNEL, true);
    let mut events = Vec::with_capacity(EVENTS_MAX);
    while launcher || !sandboxes.is_empty() {
        events.clear();
        match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Err(rustix::io::Errno::INTR) => continue,
            done => done?,
        };
        for event in &events {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == CHANNEL {
                match channel.receive::<()>() {
                    Ok(Some(((), fds))) => {
                        let Some(sandbox) = Sandbox::new(fds, socket_bytes) else {
                            continue;
                        };
                        last += 1;
                        let data = EventData::new_u64(last);
                        epoll::add(&epoll, &sandbox.asks, data, EventFlags::IN)?;
                        sandboxes.insert(last, sandbox);
                    }
                    _ => {
                        launcher = false;
                        epoll::delete(&epoll, channel)?;
                    }
                }
            } else if flags.contains(EventFlags::IN) {
                if let Some(sandbox) = sandboxes.get(&key) {
                    sandbox.answer();
                }
            } else if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                // Its last process has exited. Closing the descriptor removes it from epoll.
                sandboxes.remove(&key);
            }
        }
    }
    Ok(())
}

// === impl Sandbox ===

impl Sandbox {
    fn new(fds: Vec<OwnedFd>, socket_bytes: u64) -> Option<Self> {
        let [asks, counted, memory] = <[OwnedFd; 3]>::try_from(fds).ok()?;
        Some(Self {
            asks,
            count: Count {
                counted: counted.into(),
                memory: memory.into(),
            },
            socket_bytes,
        })
    }

    /// Continues or fails one call.
    fn answer(&self) {
        // The caller may be killed before its notification is read, or answered.
        let Ok(call) = sys::next_call(self.asks.as_fd()) else {
            return;
        };
        let refuse = match self.count.has_room(self.socket_bytes) {
            Ok(true) => None,
            // If the count cannot be read, the call fails.
            Ok(false) | Err(_) => Some(libc::ENOBUFS),
        };
        let _ = sys::answer_call(self.asks.as_fd(), call, refuse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_memory_is_more_sockets() {
        assert_eq!(sockets_max(512 << 20, SOCKET_BYTES_MIN), 2048);
        assert_eq!(sockets_max(64 << 20, SOCKET_BYTES_MIN), SOCKETS_MIN);
        assert!(socket_bytes() >= SOCKET_BYTES_MIN);
    }

    #[test]
    fn sockets_are_counted_in_the_namespace_and_what_cannot_be_counted_is_too_much() {
        let dir = tempfile::tempdir().unwrap();
        let open = |text: &str| {
            let path = dir.path().join("file");
            fs::write(&path, text).unwrap();
            let file = File::open(&path).unwrap();
            fs::remove_file(&path).unwrap();
            file
        };
        let room = |counted: &str, memory: &str| {
            let count = Count {
                counted: open(counted),
                memory: open(memory),
            };
            count.has_room(SOCKET_BYTES_MIN)
        };
        let memory = "67108864\n";
        assert!(room("sockets: used 511\nTCP: inuse 3\n", memory).unwrap());
        assert!(!room("sockets: used 512\nTCP: inuse 3\n", memory).unwrap());
        room("TCP: inuse 3\n", memory).unwrap_err();
        room("sockets: used 2\n", "").unwrap_err();
        // The real file has the line.
        let counted = File::open(COUNTED).unwrap();
        let memory = open(memory);
        Count { counted, memory }
            .has_room(SOCKET_BYTES_MIN)
            .unwrap();
    }
}
