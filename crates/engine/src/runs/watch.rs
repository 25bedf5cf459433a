//! Reading what a background run wrote: so far, or as it comes.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::Kept;
use crate::guest::{Call, LISTING_TIMEOUT};
use crate::live::{Purpose, left_active};
use crate::sessions::Shared;
use crate::{Error, Sessions};
use bytes::Bytes;
use k8e_model::{BACKGROUND_OUTPUT_BYTES_MAX, BackgroundRun, Principal, RunId};
use k8e_wire::proto::{AttachRun, reply, request};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a background run says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunWatchEvent {
    /// Bytes of its standard output.
    Stdout(Bytes),
    /// Bytes of its standard error.
    Stderr(Bytes),
    /// Last; without what it wrote.
    Ended(Box<BackgroundRun>),
}

/// What a background run said from its beginning, and says. Dropping it does not end the run.
pub struct RunWatch {
    /// None when it is over.
    source: Option<Source>,
}

enum Source {
    Live {
        kept: Arc<Kept>,
        call: Box<Call>,
        stdout_bytes: u64,
        stderr_bytes: u64,
    },
    /// Its guest has said all.
    Ending(Arc<Kept>),
    /// Of a run that is over.
    Recorded(VecDeque<RunWatchEvent>),
}

/// One stream of a run, so far.
#[derive(Default)]
pub(super) struct SoFar {
    pub(super) bytes: Vec<u8>,
    /// No more is kept.
    pub(super) full: bool,
}

// === impl Sessions ===

impl Sessions {
    /// What a background run said and says, up to its end.
    pub async fn watch_run(&self, who: &Principal, id: &RunId) -> Result<RunWatch, Error> {
        if let Some(kept) = self.shared.background.find(who, id)
            && !kept.is_over()
        {
            kept.live.check_awake()?;
            match attach(&self.shared, &kept, false).await {
                Ok(call) => {
                    let source = Some(Source::Live {
                        kept,
                        call: Box::new(call),
                        stdout_bytes: 0,
                        stderr_bytes: 0,
                    });
                    return Ok(RunWatch { source });
                }
                Err(_) if kept.over_soon().await => {}
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
    /// What comes next; none after the last. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<RunWatchEvent, Error>> {
        if let Some(Source::Live { kept, .. }) = &self.source {
            let kept = Arc::clone(kept);
            match self.next_output().await {
                Some(event) => return Some(event),
                None => self.source = Some(Source::Ending(kept)),
            }
        }
        match self.source.as_mut()? {
            Source::Recorded(events) => events.pop_front().map(Ok),
            Source::Ending(kept) => {
                let over = kept.over_soon().await;
                let run = kept.view().without_output();
                self.source = None;
                Some(match over {
                    true => Ok(RunWatchEvent::Ended(Box::new(run))),
                    false => Err(Error::Stopping),
                })
            }
            Source::Live { .. } => None,
        }
    }

    /// None when there is no more: how it ended, and whether that can be, its keeper says.
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

/// What its guest keeps of what a run wrote.
pub(super) async fn read_so_far(shared: &Shared, kept: &Kept) -> Result<(SoFar, SoFar), Error> {
    let mut call = attach(shared, kept, true).await?;
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
            _ => return Err(call.misbehaved("it said something that does not belong to a run")),
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

/// The call, once the guest says that there is such a run. One that is paused is waited for.
async fn attach(shared: &Shared, kept: &Kept, now: bool) -> Result<Call, Error> {
    let id = kept.id().to_string();
    let used = kept.live.begin_anyway(Purpose::Call, &shared.recorder)?;
    let what = format!("follow run {id}");
    let request = request::Call::AttachRun(AttachRun { id, now });
    let mut call = Call::start(used, request, what).await?;
    match call.reply().await? {
        reply::Reply::Started(_) => Ok(call),
        _ => Err(call.misbehaved("it did not say what runs")),
    }
}

/// Refuses more than was asked for.
fn counted(call: &Call, bytes: &mut u64, data: &Bytes) -> Result<(), Error> {
    *bytes += data.len() as u64;
    match *bytes {
        0..=BACKGROUND_OUTPUT_BYTES_MAX => Ok(()),
        _ => Err(call.misbehaved("it sent more output than was asked for")),
    }
}
