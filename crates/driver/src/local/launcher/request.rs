//! The closed set of requests that the unprivileged server can send to the root launcher, and the
//! answers.
//!
//! A request names a sandbox by driver and id and never a path, a pid, a user or a program: those
//! the launcher knows itself. What the types cannot say, [`Request::check`] does.

use super::Failure;
use crate::SandboxSpec;
use crate::gvisor::Platform;
use crate::local::cgroup::io::DiskRate;
use crate::local::kind::Kind;
use k8e_model::{Limits, SandboxId, Template};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// Ids in one answer to [`Request::List`]. Every id at its longest fits in a message.
pub(crate) const LIST_IDS_MAX: usize = 1024;

/// What the launcher is started with, by the server while that is still root.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Start {
    /// The data directory, absolute.
    pub(crate) data_dir: PathBuf,
    /// Keep what sandboxes write in memory, also where there are loop devices.
    pub(crate) memory_disks: bool,
    /// What one sandbox may do on disks.
    pub(crate) disk_rate: DiskRate,
    /// No sandbox gets more than this.
    pub(crate) limits_max: Limits,
    /// The group of the server's process, which may connect to guests.
    pub(crate) server_gid: u32,
    /// The Unix socket that the server listens on, which it cannot remove itself.
    pub(crate) socket: Option<SocketFile>,
}

/// A file, and not another one that has its name by now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// What the launcher says first: what this machine can do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Whether sandboxes can have a network that leads to a gate.
    pub(crate) has_network: bool,
    /// What sandboxes of any driver lack here, one sentence each.
    pub(crate) weaker: Vec<String>,
}

/// A request. All but [`Request::Signal`] are answered, on the socket that comes along.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum Request {
    /// Make a sandbox. Answered by [`Answer::Sandbox`] when its guest listens.
    Launch {
        /// By which driver.
        kind: Kind,
        /// With which id, template and limits.
        spec: SandboxSpec,
        /// For gVisor: how it gets hold of system calls.
        platform: Platform,
    },
    /// Find out whether gVisor can make a sandbox here. Answered by [`Answer::Done`].
    TryGvisor {
        /// How it gets hold of system calls.
        platform: Platform,
    },
    /// Hand over a sandbox of an earlier server: [`Answer::Sandbox`], or [`Answer::Gone`].
    Adopt {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
    },
    /// The ids of sandboxes of which anything is left: [`Answer::Ids`], in order, at most
    /// [`LIST_IDS_MAX`].
    List {
        /// Of which driver.
        kind: Kind,
        /// Only ids behind this one.
        after: Option<SandboxId>,
    },
    /// Kill a sandbox and remove every trace of it: [`Answer::Done`].
    Remove {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
    },
    /// Stop or continue an idle sandbox's own kernel. Not answered.
    Signal {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
        /// What to do.
        signal: IdleSignal,
    },
    /// Set other limits: [`Answer::Done`].
    SetLimits {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
        /// The new ones.
        limits: Limits,
    },
    /// Freeze every process in its control group: [`Answer::Done`] when they stand still.
    Freeze {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
    },
    /// Undo [`Request::Freeze`]: [`Answer::Done`].
    Thaw {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
    },
    /// Open the gate's listening sockets in its network namespace: [`Answer::Gate`].
    OpenGate {
        /// Of which driver.
        kind: Kind,
        /// Which.
        id: SandboxId,
    },
    /// Remove the Unix socket that the server listened on: [`Answer::Done`].
    RemoveSocket,
}

/// The two signals of the idle stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IdleSignal {
    /// `SIGSTOP`.
    Stop,
    /// `SIGCONT`.
    Continue,
}

/// What a request is answered with.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// A live sandbox. Descriptors: the pidfd of its first process, then the files that count how
    /// often limits were hit, as far as they exist.
    Sandbox {
        /// Whether the file that counts out-of-memory kills is among them.
        memory_events: bool,
        /// Whether the file that counts refused forks is among them.
        pids_events: bool,
    },
    /// No such sandbox, or a dead one.
    Gone,
    /// Ids of sandboxes.
    Ids(Vec<SandboxId>),
    /// The gate's sockets come along, in the order of `k8e_egress::Sockets`.
    Gate,
    /// It was done.
    Done,
    /// It was not.
    Failed(Failure),
}

// === impl SocketFile ===

impl SocketFile {
    /// The one that is there now.
    pub(crate) fn find(path: PathBuf) -> io::Result<Self> {
        let meta = fs::symlink_metadata(&path)?;
        Ok(Self {
            path,
            device: meta.dev(),
            inode: meta.ino(),
        })
    }

    /// Removes it, unless it is gone or another.
    pub(crate) fn remove(&self) -> io::Result<()> {
        match Self::find(self.path.clone()) {
            Ok(there) if there == *self => fs::remove_file(&self.path),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

// === impl Request ===

impl Request {
    /// Reads one from bytes that the server sent, and checks it.
    pub(crate) fn parse(bytes: &[u8], limits_max: &Limits) -> Result<Self, String> {
        let request: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("not a request: {error}"))?;
        request.check(limits_max)?;
        Ok(request)
    }

    /// What the types do not say: no limit is above the maximum that the launcher was started with.
    fn check(&self, limits_max: &Limits) -> Result<(), String> {
        let limits = match self {
            Self::Launch { spec, .. } => {
                let Template::Host = spec.template;
                &spec.limits
            }
            Self::SetLimits { limits, .. } => limits,
            Self::TryGvisor { .. }
            | Self::Adopt { .. }
            | Self::List { .. }
            | Self::Remove { .. }
            | Self::Signal { .. }
            | Self::Freeze { .. }
            | Self::Thaw { .. }
            | Self::OpenGate { .. }
            | Self::RemoveSocket => return Ok(()),
        };
        let within = [
            ("memory", limits.memory_bytes <= limits_max.memory_bytes),
            ("CPU", limits.cpu_millis <= limits_max.cpu_millis),
            ("processes", limits.pids <= limits_max.pids),
            ("disk", limits.disk_bytes <= limits_max.disk_bytes),
        ];
        match within.iter().find(|(_, within)| !within) {
            Some((what, _)) => Err(format!("a limit on {what} above the server's maximum")),
            None => Ok(()),
        }
    }
}

/// For the crate `fuzz`.
pub(crate) mod fuzzing {
    use super::Request;
    use k8e_model::Limits;

    /// What of a request can be checked from outside.
    #[derive(Debug)]
    pub struct Read {
        /// The request, written again.
        pub json: String,
        /// Every id that it names.
        pub sandboxes: Vec<String>,
        /// The limits that it sets.
        pub limits: Option<Limits>,
    }

    /// Reads a request as the launcher does.
    ///
    /// # Errors
    ///
    /// When the launcher would refuse it.
    pub fn launcher_request(bytes: &[u8], limits_max: &Limits) -> Result<Read, String> {
        let request = Request::parse(bytes, limits_max)?;
        let json = serde_json::to_string(&request).map_err(|error| error.to_string())?;
        let (id, limits) = match request {
            Request::Launch { spec, .. } => (Some(spec.id), Some(spec.limits)),
            Request::SetLimits { id, limits, .. } => (Some(id), Some(limits)),
            Request::List { after, .. } => (after, None),
            Request::Adopt { id, .. }
            | Request::Remove { id, .. }
            | Request::Signal { id, .. }
            | Request::Freeze { id, .. }
            | Request::Thaw { id, .. }
            | Request::OpenGate { id, .. } => (Some(id), None),
            Request::TryGvisor { .. } | Request::RemoveSocket => (None, None),
        };
        let sandboxes = id.into_iter().map(String::from).collect();
        Ok(Read {
            json,
            sandboxes,
            limits,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(limits: Limits) -> Request {
        Request::Launch {
            kind: Kind::Native,
            spec: SandboxSpec {
                id: "sbx-a".parse().unwrap(),
                template: Template::Host,
                limits,
            },
            platform: Platform::Systrap,
        }
    }

    #[test]
    fn a_request_comes_through_and_one_above_the_maximum_does_not() {
        let max = Limits::default();
        let request = launch(max);
        let bytes = serde_json::to_vec(&request).unwrap();
        assert_eq!(Request::parse(&bytes, &max), Ok(request));
        for more in [
            Limits {
                memory_bytes: max.memory_bytes + 1,
                ..max
            },
            Limits {
                cpu_millis: max.cpu_millis + 1,
                ..max
            },
            Limits {
                pids: max.pids + 1,
                ..max
            },
            Limits {
                disk_bytes: max.disk_bytes + 1,
                ..max
            },
        ] {
            let bytes = serde_json::to_vec(&launch(more)).unwrap();
            Request::parse(&bytes, &max).unwrap_err();
            let change = Request::SetLimits {
                kind: Kind::Gvisor,
                id: "sbx-a".parse().unwrap(),
                limits: more,
            };
            Request::parse(&serde_json::to_vec(&change).unwrap(), &max).unwrap_err();
        }
    }

    #[test]
    fn nothing_but_a_label_names_a_sandbox_and_nothing_else_is_taken() {
        for text in [
            r#"{"Remove":{"kind":"Native","id":"../../etc"}}"#,
            r#"{"Remove":{"kind":"Native","id":"a/b"}}"#,
            r#"{"Remove":{"kind":"Native","id":""}}"#,
            r#"{"Remove":{"kind":"Other","id":"sbx-a"}}"#,
            r#"{"Remove":{"kind":"Native","id":"sbx-a","path":"/etc"}}"#,
            r#"{"Signal":{"kind":"Gvisor","id":"sbx-a","signal":9}}"#,
            r#"{"Run":{"program":"/bin/sh"}}"#,
            "{}",
            "",
        ] {
            Request::parse(text.as_bytes(), &Limits::default()).unwrap_err();
        }
    }

    #[test]
    fn only_the_socket_that_was_meant_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k8e.sock");
        fs::write(&path, "first").unwrap();
        let first = SocketFile::find(path.clone()).unwrap();
        fs::write(dir.path().join("new"), "second").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        first.remove().unwrap();
        assert!(path.exists());
        SocketFile::find(path.clone()).unwrap().remove().unwrap();
        assert!(!path.exists());
        first.remove().unwrap();
    }

    #[test]
    fn a_full_list_fits_in_a_message() {
        let id: SandboxId = "a".repeat(63).parse().unwrap();
        let answer = Answer::Ids(vec![id; LIST_IDS_MAX]);
        let bytes = serde_json::to_vec(&answer).unwrap();
        assert!(bytes.len() < super::super::channel::MESSAGE_BYTES_MAX);
    }
}
