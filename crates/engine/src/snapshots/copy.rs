//! Copies a workspace from one guest to others, through the server, without storing it: for forks without memory.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::tree::{BATCH_MAX, DISK_SLACK_BYTES, SLOW_TIMEOUT, entry_of, proto_of};
use crate::Error;
use crate::guest::{Call, workspace};
use crate::live::{Live, Purpose};
use crate::sessions::Shared;
use futures::future::join_all;
use k8e_wire::proto::{self, input, reply, request};
use std::sync::Arc;
use std::time::Duration;

/// One of the sessions that get a copy.
struct Target {
    /// None once it has failed.
    call: Option<Call>,
    failed: Option<Error>,
}

// === impl Shared ===

impl Shared {
    /// Puts a copy of the workspace of `from` in the place of those of `to`; all of its processes are stopped meanwhile,
    /// and for how long is returned, with what became of each copy. An error is that of `from`.
    pub(crate) async fn copy_workspace(
        &self,
        from: &Arc<Live>,
        to: &[&Arc<Live>],
    ) -> Result<(Duration, Vec<Result<(), Error>>), Error> {
        let mut targets: Vec<Target> = join_all(to.iter().map(|live| self.target(live))).await;
        let save = request::Call::SaveTree(proto::SaveTree {
            root: workspace(),
            stop: true,
        });
        let mut call = self.tree_call(from, save, "copy the workspace").await?;
        let reply::Reply::TreeBegun(_) = call.slow_reply(SLOW_TIMEOUT).await? else {
            return Err(call.misbehaved("it did not begin to send its files"));
        };
        let bytes_max = from.record.limits.disk_bytes;
        let bytes_max = bytes_max.saturating_add(DISK_SLACK_BYTES);
        let done = pass_on(&mut call, &mut targets, bytes_max).await?;
        drop(call);
        let copied = join_all(targets.into_iter().map(Target::finish)).await;
        Ok((Duration::from_micros(done.stopped_us), copied))
    }

    async fn target(&self, live: &Arc<Live>) -> Target {
        let restore = request::Call::RestoreTree(proto::RestoreTree { root: workspace() });
        match self.tree_call(live, restore, "copy the workspace").await {
            Ok(call) => Target {
                call: Some(call),
                failed: None,
            },
            Err(error) => Target {
                call: None,
                failed: Some(error),
            },
        }
    }

    async fn tree_call(
        &self,
        live: &Arc<Live>,
        request: request::Call,
        what: &str,
    ) -> Result<Call, Error> {
        let used = live.begin(Purpose::Call, 0, &self.recorder)?;
        Call::start(used, request, what.to_owned()).await
    }
}

// === impl Target ===

impl Target {
    async fn send(&mut self, input: input::Input) {
        if let Some(call) = &mut self.call
            && let Err(error) = call.send(input).await
        {
            self.failed = Some(error);
            self.call = None;
        }
    }

    async fn finish(mut self) -> Result<(), Error> {
        self.send(input::Input::End(proto::End {})).await;
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let Some(mut call) = self.call else {
            return Err(Error::Stopping);
        };
        match call.slow_reply(SLOW_TIMEOUT).await? {
            reply::Reply::TreeDone(_) => Ok(()),
            _ => Err(call.misbehaved("it answered a copied tree with something else")),
        }
    }
}

/// Passes a tree on, in its order. What the guest sends is checked as for a snapshot.
async fn pass_on(
    call: &mut Call,
    targets: &mut [Target],
    bytes_max: u64,
) -> Result<proto::TreeDone, Error> {
    let (mut bytes, mut empties) = (0u64, 0);
    loop {
        let input = match call.reply().await? {
            reply::Reply::TreeEntries(batch) => {
                if batch.entries.is_empty() || batch.entries.len() > BATCH_MAX {
                    return Err(call.misbehaved("it sent a batch of files of an impossible size"));
                }
                let mut entries = Vec::with_capacity(batch.entries.len());
                for entry in batch.entries.into_iter().map(entry_of) {
                    entry.check()?;
                    entries.push(proto_of(entry));
                }
                let wanted = vec![1u8; entries.len()].into();
                let wants = input::Input::TreeWants(proto::TreeWants { wanted });
                call.send(wants).await?;
                input::Input::TreeEntries(proto::TreeEntries { entries })
            }
            reply::Reply::TreePieces(mut pieces) => {
                if pieces.pieces.is_empty() {
                    call.count_empty(&mut empties)?;
                }
                let sent = pieces.pieces.iter().map(|piece| piece.data.len() as u64);
                bytes = bytes.saturating_add(sent.sum());
                if bytes > bytes_max {
                    return Err(call.misbehaved("it sent more than its disk can hold"));
                }
                // Where a file ends its entry says.
                pieces.pieces.retain(|piece| !piece.data.is_empty());
                for piece in &mut pieces.pieces {
                    piece.end = None;
                }
                if pieces.pieces.is_empty() {
                    continue;
                }
                input::Input::TreePieces(pieces)
            }
            reply::Reply::TreeDone(done) => return Ok(done),
            _ => return Err(call.misbehaved("it sent something else than its files")),
        };
        join_all(targets.iter_mut().map(|target| target.send(input.clone()))).await;
        if targets.iter().all(|target| target.call.is_none()) {
            let failed = targets.iter_mut().find_map(|target| target.failed.take());
            return Err(failed.unwrap_or(Error::Stopping));
        }
    }
}
