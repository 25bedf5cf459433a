//! Calls of the guest, which does the work: commands, terminals, files beneath a root.
//!
//! The guest is a part of this process and speaks the protocol that it speaks inside k8e's own
//! sandboxes, over a pair of sockets. Dropping what a function here returns cancels the call.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is out of turn, also one that does not exist yet"
)]

use bytes::Bytes;
use k8e_wire::proto::{
    End, Error, ErrorCode, FileInfo, Hello, ListFiles, ReadFile, Remove, Stat, WriteFile,
    input::Input, reply::Reply, request::Call,
};
use k8e_wire::{CHUNK_BYTES, HostEnd, Inputs, Replies, WireError};

/// Why a call failed: what it means, and what to tell.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

/// The guest.
#[derive(Clone)]
pub(crate) struct Agent(k8e_guest::Agent);

/// A directory that paths are resolved beneath; neither `..` nor a symbolic link leads out of it.
#[derive(Clone)]
pub(crate) struct Root {
    agent: Agent,
    dir: Bytes,
}

/// A file that is being read.
pub(crate) struct Reading {
    replies: Replies,
    /// Its end is that of the call.
    _inputs: Inputs,
}

/// A file that is being written. It appears whole when it is finished, and not at all otherwise.
pub(crate) struct Writing(HostEnd);

// === impl Failure ===

impl Failure {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }

    /// Nothing new is begun any more. The guest has no code for that: it is never asked.
    pub(crate) fn stopping() -> Self {
        Self::new(ErrorCode::Unspecified, "the sandbox is stopping")
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.code == ErrorCode::Unspecified
    }

    fn out_of_turn() -> Self {
        Self::new(ErrorCode::Io, "the agent answered something else")
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            code: error.code(),
            message: error.message,
        }
    }
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Self {
        Self::new(ErrorCode::Io, format!("call the agent: {error}"))
    }
}

// === impl Agent ===

impl Agent {
    pub(crate) fn new(agent: k8e_guest::Agent) -> Self {
        Self(agent)
    }

    /// Starts a call.
    pub(crate) async fn start(&self, call: Call) -> Result<HostEnd, Failure> {
        Ok(self.0.call(call).await?)
    }

    /// A call with one reply.
    pub(crate) async fn one(&self, call: Call) -> Result<Reply, Failure> {
        let mut end = self.start(call).await?;
        next(&mut end.replies).await
    }

    /// How many processes there are beside this one.
    pub(crate) async fn processes(&self) -> Result<u32, Failure> {
        match self.one(Call::Hello(Hello { count: true })).await? {
            Reply::Hello(hello) => Ok(hello.processes),
            _ => Err(Failure::out_of_turn()),
        }
    }

    /// Files beneath a directory.
    pub(crate) fn root(&self, dir: Bytes) -> Root {
        let agent = self.clone();
        Root { agent, dir }
    }
}

/// The next reply; an error is one.
pub(crate) async fn next(replies: &mut Replies) -> Result<Reply, Failure> {
    match replies.next().await? {
        Reply::Error(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

// === impl Root ===

impl Root {
    /// The directory.
    pub(crate) fn dir(&self) -> &Bytes {
        &self.dir
    }

    /// What is at a path, links followed.
    pub(crate) async fn stat(&self, path: &[u8]) -> Result<FileInfo, Failure> {
        self.look(path, true).await
    }

    /// What is at a path, which may be a link.
    pub(crate) async fn lstat(&self, path: &[u8]) -> Result<FileInfo, Failure> {
        self.look(path, false).await
    }

    async fn look(&self, path: &[u8], follow: bool) -> Result<FileInfo, Failure> {
        let call = Call::Stat(Stat {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            follow,
        });
        match self.agent.one(call).await? {
            Reply::File(info) => Ok(info),
            _ => Err(Failure::out_of_turn()),
        }
    }

    /// Opens a file from an offset on; a length of 0 is to its end.
    pub(crate) async fn read(
        &self,
        path: &[u8],
        offset: u64,
        length: u64,
    ) -> Result<(FileInfo, Reading), Failure> {
        let call = Call::ReadFile(ReadFile {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            offset,
            length,
        });
        let HostEnd {
            mut replies,
            inputs,
        } = self.agent.start(call).await?;
        let Reply::File(info) = next(&mut replies).await? else {
            return Err(Failure::out_of_turn());
        };
        let _inputs = inputs;
        Ok((info, Reading { replies, _inputs }))
    }

    /// Begins to write a file, and makes the directories above it. A mode of 0 keeps that of an
    /// existing file, or is 0644.
    pub(crate) async fn write(&self, path: &[u8], mode: u32) -> Result<Writing, Failure> {
        let call = Call::WriteFile(WriteFile {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            append: false,
            mode,
        });
        Ok(Writing(self.agent.start(call).await?))
    }

    /// What is in a directory, links not followed, sorted by name; and whether that is all.
    pub(crate) async fn list(
        &self,
        path: &[u8],
        entries_max: u64,
    ) -> Result<(Vec<(String, FileInfo)>, bool), Failure> {
        let call = Call::ListFiles(ListFiles {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            entries_max,
            ..ListFiles::default()
        });
        let mut end = self.agent.start(call).await?;
        let mut entries = Vec::new();
        loop {
            match next(&mut end.replies).await? {
                Reply::Files(list) => entries.extend(list.files.into_iter().map(named)),
                Reply::Done(done) => {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                    return Ok((entries, !done.truncated));
                }
                _ => return Err(Failure::out_of_turn()),
            }
        }
    }

    /// Removes what is at a path; a link is removed, not what it leads to.
    pub(crate) async fn remove(&self, path: &[u8], recursive: bool) -> Result<(), Failure> {
        let call = Call::Remove(Remove {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            recursive,
        });
        self.agent.one(call).await.map(drop)
    }
}

/// An entry by its own name.
fn named(info: FileInfo) -> (String, FileInfo) {
    let path = &info.path;
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    (String::from_utf8_lossy(name).into_owned(), info)
}

// === impl Reading ===

impl Reading {
    /// The next bytes; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match next(&mut self.replies).await? {
            Reply::Data(data) => Ok(Some(data)),
            Reply::Done(_) => Ok(None),
            _ => Err(Failure::out_of_turn()),
        }
    }
}

// === impl Writing ===

impl Writing {
    /// Adds bytes.
    pub(crate) async fn add(&mut self, mut data: Bytes) -> Result<(), Failure> {
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            tokio::select! {
                biased;
                // Before the end of what is sent there is only one thing to say.
                reply = next(&mut self.0.replies) => {
                    return Err(reply.err().unwrap_or_else(Failure::out_of_turn));
                }
                sent = self.0.inputs.send(Input::Data(chunk)) => sent?,
            }
        }
        Ok(())
    }

    /// Gives it up; nothing of it is left when this returns.
    pub(crate) async fn abandon(self) {
        let HostEnd {
            mut replies,
            inputs,
        } = self.0;
        drop(inputs);
        while next(&mut replies).await.is_ok() {}
    }

    /// Gives the file its name.
    pub(crate) async fn finish(mut self) -> Result<(), Failure> {
        // Whatever went wrong, the reply says it better.
        let _ = self.0.inputs.send(Input::End(End {})).await;
        next(&mut self.0.replies).await.map(drop)
    }
}
