//! Guest client. Guests are untrusted: every reply is validated, and every wait has a timeout.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use crate::files::{FileInfo, FileKind};
use crate::live::{Purpose, Use, left_active, within};
use crate::metrics;
use crate::processes::Process;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{Code, Phase, Principal, SessionId, WORKSPACE};
use k8e_wire::proto::{self, input, reply, request};
use k8e_wire::{HostEnd, Inputs, Replies, WireError};
use std::io::ErrorKind;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// Reply timeout of every call but a run: a healthy guest answers within milliseconds, a slow disk takes longer.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Wait after a broken connection for the driver to report the sandbox's death, the usual cause.
pub(crate) const DEATH_NEWS_TIMEOUT: Duration = Duration::from_millis(500);

/// Entries of one file listing; a longer one is truncated.
pub(crate) const FILES_LISTED_MAX: u64 = 100_000;

/// Processes of one listing; a correct guest truncates there itself.
pub(crate) const PROCESSES_MAX: usize = 4096;

/// Bytes of names and arguments in one process listing; longer ones are truncated.
pub(crate) const PROCESSES_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Timeout for all replies of one listing together, against a guest that trickles them.
pub(crate) const LISTING_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of the start of a watch, for which the guest walks the tree.
pub(crate) const WATCH_START_TIMEOUT: Duration = Duration::from_secs(60);

/// Empty replies per call: none is needed, and endless ones would hang the call.
const EMPTY_REPLIES_MAX: u32 = 64;

/// Characters of a guest's error message that are shown to people; longer ones are cut.
const MESSAGE_CHARS_MAX: usize = 512;

/// A call to a guest in progress.
pub(crate) struct Call {
    pub(crate) replies: Replies,
    pub(crate) inputs: Option<Inputs>,
    pub(crate) used: Use,
    pub(crate) phases: watch::Receiver<Phase>,
    what: String,
}

// === impl Sessions ===

impl Sessions {
    /// Starts a call other than a run. `what` names it in errors.
    pub(crate) async fn call(
        &self,
        who: &Principal,
        id: &SessionId,
        request: request::Call,
        what: String,
    ) -> Result<Call, Error> {
        let live = self.live(who, id).await?;
        let used = live.begin(
            Purpose::Call,
            self.shared.config.runs_per_session_max,
            &self.shared.recorder,
        )?;
        Call::start(used, request, what).await
    }
}

// === impl Call ===

impl Call {
    /// Connects and sends the request.
    pub(crate) async fn start(
        used: Use,
        request: request::Call,
        what: String,
    ) -> Result<Self, Error> {
        let live = &used.live;
        let id = &live.record.id;
        let Some(sandbox) = live.sandbox() else {
            return Err(Error::SessionNotReady(id.clone()));
        };
        let mut phases = live.phases();
        let connecting = tokio::select! {
            biased;
            () = left_active(&mut phases) => return Err(live.gone()),
            connecting = live.connecting() => connecting,
        };
        // Paused after this use began: there is no guest to connect to.
        if sandbox.is_saved() {
            return Err(live.paused());
        }
        let (paused, mut left) = (phases.clone(), REPLY_TIMEOUT);
        let started = tokio::select! {
            biased;
            () = left_active(&mut phases) => return Err(live.gone()),
            started = within(&paused, &mut left, sandbox.guest().call(request)) => started,
        };
        drop(connecting);
        match started {
            Some(Ok(HostEnd { replies, inputs })) => Ok(Self {
                replies,
                inputs: Some(inputs),
                used,
                phases,
                what,
            }),
            Some(Err(WireError::Io(e))) if e.kind() == ErrorKind::WouldBlock => {
                Err(metrics::refused(Error::GuestBusy(id.clone())))
            }
            Some(Err(e)) if not_listening(&e) => Err(Error::GuestGone(id.clone())),
            Some(Err(e)) => Err(broken(&used, &mut phases, &e).await),
            None => Err(misbehaved(id, "it did not take a call in time")),
        }
    }

    /// The next reply; an error reply is an error. Cancel safe.
    pub(crate) async fn reply(&mut self) -> Result<reply::Reply, Error> {
        match self.any_reply().await? {
            reply::Reply::Error(error) => Err(self.refused(&error)),
            reply => Ok(reply),
        }
    }

    /// The next reply of a call whose work may take this long; an error reply is an error. Cancel safe.
    pub(crate) async fn slow_reply(&mut self, limit: Duration) -> Result<reply::Reply, Error> {
        match self.any_reply_in(limit).await? {
            reply::Reply::Error(error) => Err(self.refused(&error)),
            reply => Ok(reply),
        }
    }

    /// The next reply, error replies included. Cancel safe.
    pub(crate) async fn any_reply(&mut self) -> Result<reply::Reply, Error> {
        self.any_reply_in(REPLY_TIMEOUT).await
    }

    async fn any_reply_in(&mut self, limit: Duration) -> Result<reply::Reply, Error> {
        let (paused, mut left) = (self.phases.clone(), limit);
        let reply = tokio::select! {
            biased;
            () = left_active(&mut self.phases) => return Err(self.used.live.gone()),
            reply = within(&paused, &mut left, self.replies.next()) => reply,
        };
        match reply {
            Some(Ok(reply)) => Ok(reply),
            Some(Err(e)) => Err(broken(&self.used, &mut self.phases, &e).await),
            None => Err(self.misbehaved("it did not answer in time")),
        }
    }

    /// The next reply of a listing. The wait counts against `left`; a slow reader's own time does not.
    pub(crate) async fn reply_within(
        &mut self,
        left: &mut Duration,
    ) -> Result<reply::Reply, Error> {
        let paused = self.phases.clone();
        let reply = within(&paused, left, self.reply()).await;
        reply.unwrap_or_else(|| Err(self.misbehaved("it did not finish a listing in time")))
    }

    /// Resolves with the reason when the session ends. Cancel safe.
    pub(crate) async fn session_gone(&mut self) -> Error {
        left_active(&mut self.phases).await;
        self.used.live.gone()
    }

    /// Sends an input. When the guest closed the connection, its last reply has the error.
    pub(crate) async fn send(&mut self, input: input::Input) -> Result<(), Error> {
        let Some(inputs) = &mut self.inputs else {
            return Err(self.misbehaved("it had closed the connection"));
        };
        let (paused, mut left) = (self.phases.clone(), REPLY_TIMEOUT);
        let sent = tokio::select! {
            biased;
            () = left_active(&mut self.phases) => return Err(self.used.live.gone()),
            // Reads while sending: a guest that refuses the call stops reading.
            reply = self.replies.next() => match reply {
                Ok(reply::Reply::Error(error)) => return Err(self.refused(&error)),
                Ok(_) => return Err(self.misbehaved("it replied out of turn")),
                Err(e) => return Err(broken(&self.used, &mut self.phases, &e).await),
            },
            sent = within(&paused, &mut left, inputs.send(input)) => sent,
        };
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => match self.reply().await {
                Err(refused @ Error::Guest { .. }) => Err(refused),
                _ => Err(broken(&self.used, &mut self.phases, &e).await),
            },
            None => Err(self.misbehaved("it did not take data in time")),
        }
    }

    pub(crate) fn id(&self) -> &SessionId {
        &self.used.live.record.id
    }

    /// Counts an empty reply, up to `EMPTY_REPLIES_MAX`.
    pub(crate) fn count_empty(&self, empties: &mut u32) -> Result<(), Error> {
        *empties += 1;
        match *empties {
            0..=EMPTY_REPLIES_MAX => Ok(()),
            _ => Err(self.misbehaved("too many empty replies")),
        }
    }

    pub(crate) fn misbehaved(&self, what: impl Into<String>) -> Error {
        misbehaved(self.id(), what)
    }

    /// Maps a guest's error reply to an error for the caller.
    pub(crate) fn refused(&self, error: &proto::Error) -> Error {
        match guest_code(error) {
            Some(code) => Error::Guest {
                code,
                message: format!("{}: {}", self.what, clean(&error.message)),
            },
            None => self.misbehaved("it failed without a reason"),
        }
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call")
            .field("session", self.id())
            .field("what", &self.what)
            .finish_non_exhaustive()
    }
}

/// The root of every file call.
pub(crate) fn workspace() -> Bytes {
    Bytes::from_static(WORKSPACE.as_bytes())
}

pub(crate) fn misbehaved(id: &SessionId, what: impl Into<String>) -> Error {
    Error::GuestMisbehaved {
        id: id.clone(),
        what: what.into(),
    }
}

/// Error of a broken connection: the session's end if the driver reports the sandbox's death in time.
pub(crate) async fn broken(
    used: &Use,
    phases: &mut watch::Receiver<Phase>,
    error: &WireError,
) -> Error {
    let id = &used.live.record.id;
    match hung_up(error) {
        false => misbehaved(id, error.to_string()),
        true => match timeout(DEATH_NEWS_TIMEOUT, left_active(phases)).await {
            Ok(()) => used.live.gone(),
            Err(_) => misbehaved(id, "it closed the connection in the middle of a call"),
        },
    }
}

/// Whether the connection was closed, as opposed to a malformed message.
pub(crate) fn hung_up(error: &WireError) -> bool {
    matches!(error, WireError::Io(_) | WireError::Eof)
}

/// Sanitizes a guest's text for people: bounded, one line, no control characters.
pub(crate) fn clean(text: &str) -> String {
    text.chars()
        .take(MESSAGE_CHARS_MAX)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Maps a guest's error code; none for an unknown one.
fn guest_code(error: &proto::Error) -> Option<Code> {
    match proto::ErrorCode::try_from(error.code).ok()? {
        proto::ErrorCode::Unspecified => None,
        proto::ErrorCode::Invalid | proto::ErrorCode::Outside | proto::ErrorCode::NoProgram => {
            Some(Code::Invalid)
        }
        proto::ErrorCode::NotFound => Some(Code::NotFound),
        proto::ErrorCode::Exists => Some(Code::Exists),
        proto::ErrorCode::Permission => Some(Code::Denied),
        proto::ErrorCode::Exhausted => Some(Code::Exhausted),
        proto::ErrorCode::IsDirectory
        | proto::ErrorCode::NotDirectory
        | proto::ErrorCode::Precondition => Some(Code::Precondition),
        proto::ErrorCode::Io => Some(Code::Internal),
    }
}

/// Validates a file description against path traversal: a client that writes a listing to disk must stay
/// below its target directory.
///
/// Bytes are copied: a slice would keep the whole frame alive.
pub(crate) fn checked_info(info: proto::FileInfo, root: &str) -> Result<FileInfo, &'static str> {
    let below = info
        .path
        .strip_prefix(root.trim_end_matches('/').as_bytes())
        .filter(|rest| rest.is_empty() || rest[0] == b'/');
    let Some(rest) = below else {
        return Err("it described a file outside the directory that was asked about");
    };
    if rest.contains(&0)
        || rest
            .split(|b| *b == b'/')
            .any(|part| matches!(part, b"." | b".."))
    {
        return Err("it described a file with an impossible path");
    }
    let kind = match proto::FileType::try_from(info.r#type) {
        Ok(proto::FileType::File) => FileKind::File,
        Ok(proto::FileType::Directory) => FileKind::Directory,
        Ok(proto::FileType::Symlink) => FileKind::Symlink,
        Ok(proto::FileType::Other) => FileKind::Other,
        Ok(proto::FileType::Unspecified) | Err(_) => return Err("it described a file of no type"),
    };
    Ok(FileInfo {
        path: Bytes::copy_from_slice(&info.path),
        kind,
        size: info.size,
        mode: info.mode & 0o7777,
        uid: info.uid,
        gid: info.gid,
        mtime_unix_ns: info.mtime_unix_ns,
        symlink_target: Bytes::copy_from_slice(&info.symlink_target),
    })
}

/// Validates and truncates a process description; what it keeps is taken off `bytes_left`. Bytes are copied, as above.
pub(crate) fn checked_process(process: &proto::Process, bytes_left: &mut usize) -> Process {
    const COMM_BYTES_MAX: usize = 64;
    const CMDLINE_BYTES_MAX: usize = 4096;
    let mut cut = |bytes: &Bytes, max: usize| {
        let kept = bytes.len().min(max).min(*bytes_left);
        *bytes_left -= kept;
        Bytes::copy_from_slice(&bytes[..kept])
    };
    Process {
        pid: process.pid,
        ppid: process.ppid,
        state: process
            .state
            .chars()
            .next()
            .filter(char::is_ascii_alphabetic)
            .unwrap_or('?'),
        comm: cut(&process.comm, COMM_BYTES_MAX),
        cmdline: cut(&process.cmdline, CMDLINE_BYTES_MAX),
        rss_bytes: process.rss_bytes,
        uid: process.uid,
    }
}

/// Connection refused or no socket: the guest is gone and so is the sandbox.
fn not_listening(error: &WireError) -> bool {
    matches!(error, WireError::Io(e) if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound))
}
