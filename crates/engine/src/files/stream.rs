//! Streams of file content and listings, validated as they arrive.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use super::FileInfo;
use crate::guest::{Call, FILES_LISTED_MAX, checked_info};
use crate::metrics;
use crate::{Audit, Error};
use bytes::Bytes;
use k8e_wire::CHUNK_BYTES;
use k8e_wire::proto::{self, input, reply};
use std::time::Duration;

/// A file being read. Dropping it ends the call.
#[derive(Debug)]
pub struct FileReader {
    /// Metadata at the start of the read.
    pub info: FileInfo,
    pub(super) call: Call,
    /// Bytes left to read; none is to the end.
    pub(super) wanted: Option<u64>,
    pub(super) empties: u32,
    pub(super) done: bool,
}

/// A file being written. Dropping it before [`FileWriter::finish`] cancels: nothing is written.
#[derive(Debug)]
pub struct FileWriter {
    pub(super) call: Call,
    pub(super) bytes: u64,
    pub(super) audit: Audit,
}

/// A listing in progress. Dropping it ends the call.
#[derive(Debug)]
pub struct FileLister {
    pub(super) call: Call,
    /// Entries are below this directory.
    pub(super) root: &'static str,
    pub(super) listed: u64,
    pub(super) empties: u32,
    /// Time left for the guest's replies.
    pub(super) time_left: Duration,
    pub(super) truncated: bool,
    pub(super) done: bool,
}

// === impl FileReader ===

impl FileReader {
    /// The next bytes; none at the end. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        while !self.done {
            match self.call.reply().await? {
                reply::Reply::Data(data) if data.is_empty() => {
                    self.call.count_empty(&mut self.empties)?
                }
                reply::Reply::Data(data) => {
                    if let Some(wanted) = &mut self.wanted {
                        *wanted = wanted.checked_sub(data.len() as u64).ok_or_else(|| {
                            self.call
                                .misbehaved("it sent more of a file than was asked for")
                        })?;
                    }
                    metrics::file_read(data.len() as u64);
                    return Ok(Some(data));
                }
                reply::Reply::Done(_) => self.done = true,
                _ => {
                    return Err(self
                        .call
                        .misbehaved("it sent something else than a file's bytes"));
                }
            }
        }
        Ok(None)
    }
}

// === impl FileWriter ===

impl FileWriter {
    /// Sends the next bytes. Not cancel safe: when dropped half way, drop the writer too.
    pub async fn write(&mut self, mut data: Bytes) -> Result<(), Error> {
        self.bytes += data.len() as u64;
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            let sent = self.call.send(input::Input::Data(chunk)).await;
            sent.inspect_err(|error| self.audit.failed(error))?;
        }
        Ok(())
    }

    /// Resolves with the reason when the session ends and no more can be written. Cancel safe.
    pub async fn session_gone(&mut self) -> Error {
        self.call.session_gone().await
    }

    /// Commits the write. Returns the number of bytes written.
    pub async fn finish(mut self) -> Result<u64, Error> {
        let finished = self.put_in_place().await;
        self.audit.end(finished)
    }

    async fn put_in_place(&mut self) -> Result<u64, Error> {
        self.call.send(input::Input::End(proto::End {})).await?;
        match self.call.reply().await? {
            reply::Reply::Done(done) if done.bytes == self.bytes => {
                metrics::file_written(self.bytes);
                Ok(self.bytes)
            }
            reply::Reply::Done(_) => Err(self
                .call
                .misbehaved("it reported another number of written bytes")),
            _ => Err(self
                .call
                .misbehaved("it answered a write with something else than done")),
        }
    }
}

// === impl FileLister ===

impl FileLister {
    /// The next entries; none at the end. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<Vec<FileInfo>>, Error> {
        while !self.done {
            match self.call.reply_within(&mut self.time_left).await? {
                reply::Reply::Files(list) if list.files.is_empty() => {
                    self.call.count_empty(&mut self.empties)?
                }
                reply::Reply::Files(list) => {
                    self.listed += list.files.len() as u64;
                    if self.listed > FILES_LISTED_MAX {
                        return Err(self
                            .call
                            .misbehaved("it listed more files than was asked for"));
                    }
                    let files = list.files.into_iter();
                    let files: Result<Vec<_>, _> =
                        files.map(|info| checked_info(info, self.root)).collect();
                    return files.map(Some).map_err(|what| self.call.misbehaved(what));
                }
                reply::Reply::Done(done) => {
                    self.truncated = done.truncated;
                    self.done = true;
                }
                _ => {
                    return Err(self
                        .call
                        .misbehaved("it sent something else than a listing"));
                }
            }
        }
        Ok(None)
    }

    /// Whether the listing was truncated at `FILES_LISTED_MAX`. Known at the end.
    pub fn truncated(&self) -> bool {
        self.truncated
    }
}
