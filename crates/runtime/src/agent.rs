//! Client of the guest agent, which runs commands and terminals and accesses files beneath a root.
//!
//! The guest is linked into this process. Calls use the same protocol as inside k8e's own sandboxes, over a socket
//! pair. Dropping what a function here returns cancels the call.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other reply is a protocol error, also a kind that is added later"
)]

use bytes::Bytes;
use k8e_wire::proto::{
    End, Error, ErrorCode, FileInfo, Hello, ListFiles, ReadFile, Remove, Stat, WriteFile,
    input::Input, reply::Reply, request::Call,
};
use k8e_wire::{CHUNK_BYTES, HostEnd, Inputs, Replies, WireError};

/// A failed call: an error code, and a message for the client.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

/// Handle of the guest agent.
#[derive(Clone)]
pub(crate) struct Agent(k8e_guest::Agent);

/// A directory beneath which paths are resolved. Neither `..` nor a symbolic link leads out of it.
#[derive(Clone)]
pub(crate) struct Root {
    agent: Agent,
    dir: Bytes,
}

/// An open file of which the guest streams the content.
pub(crate) struct FileReader {
    replies: Replies,
    /// Dropping it would cancel the call.
    _inputs: Inputs,
}

/// A file that is being written. It appears atomically with [`FileWriter::finish`], and not at all otherwise.
pub(crate) struct FileWriter(HostEnd);

// === impl Failure ===

impl Failure {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }

    /// The runtime is shutting down. The guest has no code for this and never returns it.
    pub(crate) fn stopping() -> Self {
        Self::new(ErrorCode::Unspecified, "the sandbox is stopping")
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.code == ErrorCode::Unspecified
    }

    fn unexpected_reply() -> Self {
        Self::new(ErrorCode::Io, "the guest agent sent an unexpected reply")
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
        Self::new(ErrorCode::Io, format!("call the guest agent: {error}"))
    }
}

// === impl Agent ===

impl Agent {
    pub(crate) fn new(agent: k8e_guest::Agent) -> Self {
        Self(agent)
    }

    /// Starts a call with streamed replies.
    pub(crate) async fn start(&self, call: Call) -> Result<HostEnd, Failure> {
        Ok(self.0.call(call).await?)
    }

    /// Makes a call that has one reply.
    pub(crate) async fn one(&self, call: Call) -> Result<Reply, Failure> {
        let mut end = self.start(call).await?;
        next(&mut end.replies).await
    }

    /// Number of processes in the pod, without this one.
    pub(crate) async fn processes(&self) -> Result<u32, Failure> {
        match self.one(Call::Hello(Hello { count: true })).await? {
            Reply::Hello(hello) => Ok(hello.processes),
            _ => Err(Failure::unexpected_reply()),
        }
    }

    /// Gives access to the files beneath a directory.
    pub(crate) fn root(&self, dir: Bytes) -> Root {
        let agent = self.clone();
        Root { agent, dir }
    }
}

/// The next reply. An error reply becomes an `Err`.
pub(crate) async fn next(replies: &mut Replies) -> Result<Reply, Failure> {
    match replies.next().await? {
        Reply::Error(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

// === impl Root ===

impl Root {
    /// Absolute path of the directory.
    pub(crate) fn dir(&self) -> &Bytes {
        &self.dir
    }

    /// `stat`: follows symbolic links.
    pub(crate) async fn stat(&self, path: &[u8]) -> Result<FileInfo, Failure> {
        self.file_info(path, true).await
    }

    /// `lstat`: does not follow a symbolic link at the end of the path.
    pub(crate) async fn lstat(&self, path: &[u8]) -> Result<FileInfo, Failure> {
        self.file_info(path, false).await
    }

    async fn file_info(&self, path: &[u8], follow: bool) -> Result<FileInfo, Failure> {
        let call = Call::Stat(Stat {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            follow,
        });
        match self.agent.one(call).await? {
            Reply::File(info) => Ok(info),
            _ => Err(Failure::unexpected_reply()),
        }
    }

    /// Reads `length` bytes of a file from `offset`; a length of 0 means to its end.
    pub(crate) async fn read(
        &self,
        path: &[u8],
        offset: u64,
        length: u64,
    ) -> Result<(FileInfo, FileReader), Failure> {
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
            return Err(Failure::unexpected_reply());
        };
        let _inputs = inputs;
        Ok((info, FileReader { replies, _inputs }))
    }

    /// Starts to write a file, and creates its parent directories. A mode of 0 keeps the mode of an existing file; a
    /// new file gets 0644.
    pub(crate) async fn write(&self, path: &[u8], mode: u32) -> Result<FileWriter, Failure> {
        let call = Call::WriteFile(WriteFile {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            append: false,
            mode,
            user: String::new(),
        });
        Ok(FileWriter(self.agent.start(call).await?))
    }

    /// Lists a directory, sorted by name, without following symbolic links. Also returns whether the list is complete.
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
                _ => return Err(Failure::unexpected_reply()),
            }
        }
    }

    /// Removes a file or directory. Of a symbolic link, the link is removed and not its target.
    pub(crate) async fn remove(&self, path: &[u8], recursive: bool) -> Result<(), Failure> {
        let call = Call::Remove(Remove {
            root: self.dir.clone(),
            path: Bytes::copy_from_slice(path),
            recursive,
        });
        self.agent.one(call).await.map(drop)
    }
}

/// Pairs an entry with the last component of its path.
fn named(info: FileInfo) -> (String, FileInfo) {
    let path = &info.path;
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    (String::from_utf8_lossy(name).into_owned(), info)
}

// === impl FileReader ===

impl FileReader {
    /// The next chunk; `None` at the end of the file.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match next(&mut self.replies).await? {
            Reply::Data(data) => Ok(Some(data)),
            Reply::Done(_) => Ok(None),
            _ => Err(Failure::unexpected_reply()),
        }
    }
}

// === impl FileWriter ===

impl FileWriter {
    /// Appends bytes.
    pub(crate) async fn add(&mut self, mut data: Bytes) -> Result<(), Failure> {
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            tokio::select! {
                biased;
                // Before the end of the input, the only possible reply is an error.
                reply = next(&mut self.0.replies) => {
                    return Err(reply.err().unwrap_or_else(Failure::unexpected_reply));
                }
                sent = self.0.inputs.send(Input::Data(chunk)) => sent?,
            }
        }
        Ok(())
    }

    /// Discards the file. Its temporary file is removed when this returns.
    pub(crate) async fn abandon(self) {
        let HostEnd {
            mut replies,
            inputs,
        } = self.0;
        drop(inputs);
        while next(&mut replies).await.is_ok() {}
    }

    /// Ends the content and renames the file into place.
    pub(crate) async fn finish(mut self) -> Result<(), Failure> {
        // If this fails, the reply has the cause.
        let _ = self.0.inputs.send(Input::End(End {})).await;
        next(&mut self.0.replies).await.map(drop)
    }
}
