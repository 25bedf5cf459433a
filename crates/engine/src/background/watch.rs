//! Output of a background run: read so far (poll), or streamed (watch).
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::TrackedRun;
use crate::guest::{Call, LISTING_TIMEOUT};
use crate::live::{Purpose, left_active};
use crate::sessions::Shared;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{BACKGROUND_OUTPUT_BYTES_MAX, BackgroundRun, Principal, RunId};
use k8e_wire::proto::{AttachRun, reply, request};
use std::collections::VecDeque;
use std::sync::Arc;

/// Event of a watched background run: output, then `Ended`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunWatchEvent {
    /// Bytes of its standard output.
    Stdout(Bytes),
    /// Bytes of its standard error.
    Stderr(Bytes),
    /// Last event: the run's record without its output.
    Ended(Box<BackgroundRun>),
}

/// Event stream of a background run, from its beginning. Dropping it does not end the run.
pub struct RunWatch {
    /// None after the last event.
    source: Option<Source>,
}

enum Source {
    Live {
        tracked: Arc<TrackedRun>,
        call: Box<Call>,
        stdout_bytes: u64,
        stderr_bytes: u64,
    },
    /// The guest has sent all output; the end is not stored yet.
    Ending(Arc<TrackedRun>),
    /// Stored events of an ended run.
    Recorded(VecDeque<RunWatchEvent>),
}

/// Output of one stream (stdout or stderr) so far.
#[derive(Default)]
pub(super) struct SoFar {
    pub(super) bytes: Vec<u8>,
    /// The output limit is reached: no more is kept.
    pub(super) full: bool,
}

// === impl Sessions ===

impl Sessions {
    /// Streams the output of a background run, from its beginning to its end.
    pub async fn watch_run(&self, who: &Principal, id: &RunId) -> Result<RunWatch, Error> {
        if let Some(tracked) = self.shared.background.find(who, id)
            && !tracked.is_over()
        {
            tracked.live.check_awake()?;
            match attach(&self.shared, &tracked, false).await {
                Ok(call) => {
                    let source = Some(Source::Live {
                        tracked,
                        call: Box::new(call),
                        stdout_bytes: 0,
                        stderr_bytes: 0,
                    });
                    return Ok(RunWatch { source });
                }
                Err(_) if tracked.over_soon().await => {}
                Err(error) => return Err(error),
            }
        }
        let run = self.poll_run(who, id).await?;
        let end = RunWatchEvent::Ended(Box::new(run.without_output()));
        let events = [
            RunWatchEvent::Stdout(run.stdout.into()),
            RunWatchEvent::Stderr(run.stderr.into()),
            end,
        ];
        let says = |event: &RunWatchEvent| match event {
            RunWatchEvent::Stdout(data) | RunWatchEvent::Stderr(data) => !data.is_empty(),
            RunWatchEvent::Ended(_) => true,
        };
        let source = Source::Recorded(events.into_iter().filter(says).collect());
        Ok(RunWatch {
            source: Some(source),
        })
    }
}

// === impl RunWatch ===

impl RunWatch {
    /// The next event; none after the last. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<RunWatchEvent, Error>> {
        if let Some(Source::Live { tracked, .. }) = &self.source {
            let tracked = Arc::clone(tracked);
            match self.next_output().await {
                Some(event) => return Some(event),
                None => self.source = Some(Source::Ending(tracked)),
            }
        }
        match self.source.as_mut()? {
            Source::Recorded(events) => events.pop_front().map(Ok),
            Source::Ending(tracked) => {
                let over = tracked.over_soon().await;
                let run = tracked.view().without_output();
                self.source = None;
                Some(match over {
                    true => Ok(RunWatchEvent::Ended(Box::new(run))),
                    false => Err(Error::Stopping),
                })
            }
            Source::Live { .. } => None,
        }
    }

    /// The next output; none when there is no more. The end itself is validated and stored by the follower.
    async fn next_output(&mut self) -> Option<Result<RunWatchEvent, Error>> {
        let Some(Source::Live {
            call,
            stdout_bytes,
            stderr_bytes,
            ..
        }) = &mut self.source
        else {
            return None;
        };
        let reply = tokio::select! {
            biased;
            () = left_active(&mut call.phases) => None,
            reply = call.replies.next() => reply.ok(),
        };
        let event = match reply? {
            reply::Reply::Stdout(data) => {
                counted(call, stdout_bytes, &data).map(|()| RunWatchEvent::Stdout(data))
            }
            reply::Reply::Stderr(data) => {
                counted(call, stderr_bytes, &data).map(|()| RunWatchEvent::Stderr(data))
            }
            _ => return None,
        };
        if event.is_err() {
            self.source = None;
        }
        Some(event)
    }
}

/// The output that the guest keeps of a run.
pub(super) async fn read_so_far(
    shared: &Shared,
    tracked: &TrackedRun,
) -> Result<(SoFar, SoFar), Error> {
    let mut call = attach(shared, tracked, true).await?;
    let (mut stdout, mut stderr) = (SoFar::default(), SoFar::default());
    let mut left = LISTING_TIMEOUT;
    let mut empties = 0;
    loop {
        let (stream, data) = match call.reply_within(&mut left).await? {
            reply::Reply::Stdout(data) => (&mut stdout, data),
            reply::Reply::Stderr(data) => (&mut stderr, data),
            reply::Reply::Exited(exited) => {
                stdout.full = exited.stdout_truncated;
                stderr.full = exited.stderr_truncated;
                return Ok((stdout, stderr));
            }
            reply::Reply::Done(_) => return Ok((stdout, stderr)),
            _ => return Err(call.misbehaved("it sent a message that does not belong to a run")),
        };
        if data.is_empty() {
            call.count_empty(&mut empties)?;
        }
        let mut bytes = stream.bytes.len() as u64;
        counted(&call, &mut bytes, &data)?;
        stream.bytes.extend_from_slice(&data);
        stream.full = bytes >= BACKGROUND_OUTPUT_BYTES_MAX;
    }
}

/// Attaches to a run in its guest. Waits while the session is paused.
async fn attach(shared: &Shared, tracked: &TrackedRun, now: bool) -> Result<Call, Error> {
    let id = tracked.id().to_string();
    let used = tracked.live.begin_anyway(Purpose::Call, &shared.recorder)?;
    let what = format!("follow run {id}");
    let request = request::Call::AttachRun(AttachRun { id, now });
    let mut call = Call::start(used, request, what).await?;
    match call.reply().await? {
        reply::Reply::Started(_) => Ok(call),
        _ => Err(call.misbehaved("it did not report what runs")),
    }
}

/// Enforces the output limit of a background run.
fn counted(call: &Call, bytes: &mut u64, data: &Bytes) -> Result<(), Error> {
    *bytes += data.len() as u64;
    match *bytes {
        0..=BACKGROUND_OUTPUT_BYTES_MAX => Ok(()),
        _ => Err(call.misbehaved("it sent more output than was asked for")),
    }
}
