//! The closed set of requests that the unprivileged server can send to the root launcher, and the
//! answers.
//!
//! A request names a sandbox by driver and id and never a path, a pid, a user or a program: those
//! the launcher knows itself. What the types cannot say, [`Request::check`] does.

use super::{Class, Failure};
use crate::gvisor::Platform;
use crate::local::cgroup::io::DiskRate;
use crate::local::kind::Kind;
use crate::{LayerSize, SandboxSpec};
use k8e_image::Compression;
use k8e_model::{Digest, IMAGE_LAYERS_MAX, Limits, SandboxId, Template};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// Bound on the ids in one answer to [`Request::List`]: every id at its longest fits in a message.
pub(crate) const LIST_IDS_MAX: usize = 1024;

/// Layers in one answer to [`Request::ListLayers`].
pub(crate) const LIST_LAYERS_MAX: usize = 1024;

/// What the launcher is started with, by the server while that is still root.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Start {
    /// The data directory, absolute.
    pub(crate) data_dir: PathBuf,
    /// Keep the writable layer in memory (tmpfs) also where there are loop devices.
    pub(crate) memory_disks: bool,
    /// Disk I/O limits of one sandbox.
    pub(crate) disk_rate: DiskRate,
    /// Maximum limits of a sandbox.
    pub(crate) limits_max: Limits,
    /// The group of the server's process, which may connect to guests.
    pub(crate) server_gid: u32,
    /// The Unix socket that the server listens on, which it cannot remove itself.
    pub(crate) socket: Option<SocketFile>,
    /// The runsc to use, instead of one that is found.
    pub(crate) runsc: Option<PathBuf>,
}

/// A file by path and inode: not another file that has its name by now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// The launcher's first message: features of this machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Whether sandboxes can have a network whose only peer is the egress gate.
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
        /// Its driver.
        kind: Kind,
        /// Its id, template and limits.
        spec: SandboxSpec,
        /// gVisor platform: how the sentry intercepts system calls.
        platform: Platform,
    },
    /// Try out whether gVisor can make a sandbox here. Answered by [`Answer::Done`].
    TryGvisor {
        /// gVisor platform: how the sentry intercepts system calls.
        platform: Platform,
    },
    /// Write a gVisor sandbox whose guest has closed its socket to disk, and end its processes: [`Answer::Done`].
    /// When it fails, the sandbox runs on.
    Save {
        /// Its id.
        id: SandboxId,
    },
    /// Make a saved gVisor sandbox run again: [`Answer::Restored`]. Its state stays until it is forgotten.
    Restore {
        /// Its id.
        id: SandboxId,
        /// Its limits.
        limits: Limits,
    },
    /// Write the state of a gVisor sandbox whose guest has closed its socket to disk, and let it go on:
    /// [`Answer::Copied`]. When it fails, the sandbox goes on too.
    CopyState {
        /// Its id.
        id: SandboxId,
        /// The id that the state gets. It is removed like a sandbox.
        state: SandboxId,
    },
    /// Make a new gVisor sandbox from the state of another: [`Answer::Restored`]. The state stays.
    LaunchFrom {
        /// The id of the new sandbox.
        id: SandboxId,
        /// Its limits.
        limits: Limits,
        /// The id of the state: of a saved sandbox, or one that [`Request::CopyState`] made.
        state: SandboxId,
    },
    /// Remove the state of a gVisor sandbox that runs again: [`Answer::Done`].
    ForgetState {
        /// Its id.
        id: SandboxId,
    },
    /// Let a gVisor sandbox run on that was to be saved: [`Answer::Done`] when its guest listens.
    RunOn {
        /// Its id.
        id: SandboxId,
    },
    /// Adopt a sandbox of an earlier server: [`Answer::Sandbox`], [`Answer::Saved`] or [`Answer::Gone`].
    Adopt {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// The ids of sandboxes of which any resource is left: [`Answer::Ids`], in order, at most
    /// [`LIST_IDS_MAX`].
    List {
        /// Their driver.
        kind: Kind,
        /// Only ids after this one (pagination).
        after: Option<SandboxId>,
    },
    /// Kill a sandbox and remove every trace of it: [`Answer::Done`].
    Remove {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// Idle stop or wake: stop or continue a separate kernel. Not answered.
    Signal {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
        /// `SIGSTOP` or `SIGCONT`.
        signal: IdleSignal,
    },
    /// Set other limits: [`Answer::Done`].
    SetLimits {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
        /// The new limits.
        limits: Limits,
    },
    /// Kill its first process, and so all of it, because its guest frees no memory: [`Answer::Done`]. Refused
    /// while it is frozen.
    Kill {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// Freeze its control group: [`Answer::Done`] when all processes are frozen.
    Freeze {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// Thaw its control group: [`Answer::Done`].
    Thaw {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// Open the gate's listening sockets in its network namespace: [`Answer::Gate`].
    OpenGate {
        /// Its driver.
        kind: Kind,
        /// Its id.
        id: SandboxId,
    },
    /// Remove the Unix socket that the server listened on: [`Answer::Done`].
    RemoveSocket,
    /// Unpack a layer of an image, in a confined process: [`Answer::Layer`]. A descriptor of its bytes
    /// comes along, behind the socket for the answer.
    UnpackLayer {
        /// What it must be when uncompressed, and its name.
        diff_id: Digest,
        /// How its bytes are compressed.
        compression: Compression,
        /// Uncompressed, no more than this; the launcher has a maximum of its own.
        bytes_max: u64,
    },
    /// What a layer takes: [`Answer::Layer`].
    FindLayer {
        /// Which.
        diff_id: Digest,
    },
    /// The layers that are there: [`Answer::Layers`], in order, at most [`LIST_LAYERS_MAX`].
    ListLayers {
        /// Only those behind this one.
        after: Option<Digest>,
    },
    /// Remove a layer: [`Answer::Done`].
    RemoveLayer {
        /// Which.
        diff_id: Digest,
    },
}

/// The two signals of idle stop and wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IdleSignal {
    /// `SIGSTOP`.
    Stop,
    /// `SIGCONT`.
    Continue,
}

/// Descriptors that come with a sandbox, in this order.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Passed {
    /// The counter of OOM kills.
    pub(crate) memory_events: bool,
    /// The counter of refused forks.
    pub(crate) pids_events: bool,
    /// Two: total memory usage, and its parts.
    pub(crate) memory_use: bool,
    /// The counter of CPU time.
    pub(crate) cpu_time: bool,
    /// The gate's sockets as in [`Answer::Gate`]: only those of a new sandbox, which saves a request.
    pub(crate) gate: bool,
}

/// Answer to a request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// A live sandbox. Descriptors: the pidfd of its first process, then those that [`Passed`] lists.
    Sandbox(Passed),
    /// A sandbox that runs again, with the descriptors of [`Answer::Sandbox`]; why it has only its files, if so.
    Restored(Passed, Option<String>),
    /// A sandbox that is saved: it has no processes.
    Saved,
    /// The state of a sandbox was copied; how long its processes were stopped, in microseconds.
    Copied(u64),
    /// No such sandbox, or a dead one.
    Gone,
    /// Ids of sandboxes.
    Ids(Vec<SandboxId>),
    /// The gate's sockets come along, in the order of `k8e_egress::Sockets`.
    Gate,
    /// What a layer takes; none when it is not there.
    Layer(Option<LayerSize>),
    /// Layers of images.
    Layers(Vec<Digest>),
    /// It was done.
    Done,
    /// Failure.
    Failed(Failure),
}

// === impl SocketFile ===

impl SocketFile {
    /// The file that is there now.
    pub(crate) fn find(path: PathBuf) -> io::Result<Self> {
        let meta = fs::symlink_metadata(&path)?;
        Ok(Self {
            path,
            device: meta.dev(),
            inode: meta.ino(),
        })
    }

    /// Removes it, unless it is gone or was replaced.
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
    /// Decodes and checks a request from the server.
    pub(crate) fn parse(bytes: &[u8], limits_max: &Limits) -> Result<Self, String> {
        let request: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("not a request: {error}"))?;
        request.check(limits_max)?;
        Ok(request)
    }

    /// Its concurrency class; none when the launcher serves it without a fork.
    pub(crate) fn class(&self) -> Option<Class> {
        match self {
            Self::Launch { .. }
            | Self::TryGvisor { .. }
            | Self::Save { .. }
            | Self::CopyState { .. }
            | Self::LaunchFrom { .. }
            | Self::Restore { .. } => Some(Class::Launch),
            Self::Remove { .. } | Self::ForgetState { .. } => Some(Class::Removal),
            Self::UnpackLayer { .. } | Self::RemoveLayer { .. } => Some(Class::Layer),
            Self::Freeze { .. }
            | Self::OpenGate { .. }
            | Self::RunOn { .. }
            | Self::Adopt { .. } => Some(Class::Other),
            Self::List { .. }
            | Self::Signal { .. }
            | Self::SetLimits { .. }
            | Self::Kill { .. }
            | Self::Thaw { .. }
            | Self::FindLayer { .. }
            | Self::ListLayers { .. }
            | Self::RemoveSocket => None,
        }
    }

    /// Checks that the types cannot express: no limit is above the maximum that the launcher was started with.
    fn check(&self, limits_max: &Limits) -> Result<(), String> {
        let limits = match self {
            Self::Launch { spec, .. } => {
                let layers = spec.layers.len();
                let fits = match spec.template {
                    Template::Host => layers == 0,
                    Template::Image { .. } => (1..=IMAGE_LAYERS_MAX).contains(&layers),
                };
                if !fits {
                    return Err("a number of layers that its template cannot have".to_owned());
                }
                &spec.limits
            }
            Self::SetLimits { limits, .. }
            | Self::Restore { limits, .. }
            | Self::LaunchFrom { limits, .. } => limits,
            Self::TryGvisor { .. }
            | Self::CopyState { .. }
            | Self::Save { .. }
            | Self::ForgetState { .. }
            | Self::RunOn { .. }
            | Self::Adopt { .. }
            | Self::List { .. }
            | Self::Remove { .. }
            | Self::Signal { .. }
            | Self::Kill { .. }
            | Self::Freeze { .. }
            | Self::Thaw { .. }
            | Self::OpenGate { .. }
            | Self::UnpackLayer { .. }
            | Self::FindLayer { .. }
            | Self::ListLayers { .. }
            | Self::RemoveLayer { .. }
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

    /// The parts of a request that the fuzz target checks.
    #[derive(Debug)]
    pub struct Read {
        /// The request, encoded again.
        pub json: String,
        /// Every id that it names.
        pub sandboxes: Vec<String>,
        /// The limits that it sets.
        pub limits: Option<Limits>,
    }

    /// Decodes a request as the launcher does.
    ///
    /// # Errors
    ///
    /// When the launcher would refuse it.
    pub fn launcher_request(bytes: &[u8], limits_max: &Limits) -> Result<Read, String> {
        let request = Request::parse(bytes, limits_max)?;
        let json = serde_json::to_string(&request).map_err(|error| error.to_string())?;
        let (ids, limits) = match request {
            Request::Launch { spec, .. } => (vec![spec.id], Some(spec.limits)),
            Request::SetLimits { id, limits, .. } | Request::Restore { id, limits } => {
                (vec![id], Some(limits))
            }
            Request::LaunchFrom { id, limits, state } => (vec![id, state], Some(limits)),
            Request::CopyState { id, state } => (vec![id, state], None),
            Request::List { after, .. } => (after.into_iter().collect(), None),
            Request::Adopt { id, .. }
            | Request::Save { id }
            | Request::ForgetState { id }
            | Request::RunOn { id }
            | Request::Remove { id, .. }
            | Request::Signal { id, .. }
            | Request::Kill { id, .. }
            | Request::Freeze { id, .. }
            | Request::Thaw { id, .. }
            | Request::OpenGate { id, .. } => (vec![id], None),
            Request::TryGvisor { .. }
            | Request::UnpackLayer { .. }
            | Request::FindLayer { .. }
            | Request::ListLayers { .. }
            | Request::RemoveLayer { .. }
            | Request::RemoveSocket => (Vec::new(), None),
        };
        let sandboxes = ids.into_iter().map(String::from).collect();
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
                layers: Vec::new(),
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
            r#"{"RemoveLayer":{"diff_id":"sha256:../../etc"}}"#,
            r#"{"UnpackLayer":{"diff_id":"/etc","compression":"None","bytes_max":1}}"#,
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
        let answer = Answer::Layers(vec![Digest::from_bytes(&[255; 32]); LIST_LAYERS_MAX]);
        let bytes = serde_json::to_vec(&answer).unwrap();
        assert!(bytes.len() < super::super::channel::MESSAGE_BYTES_MAX);
    }
}
