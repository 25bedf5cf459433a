//! Client of a guest for tests: each call to its end.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a test knows the replies it wants"
)]

use bytes::Bytes;
use k8e_driver::GuestAddress;
use k8e_wire::HostEnd;
use k8e_wire::proto::{
    self, Argv, Exec, Exited, exec::Program, input, reply::Reply, request::Call,
};

/// Root directory of file calls.
pub(super) const ROOT: &[u8] = b"/workspace";

/// Output and exit status of a command.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Exit status.
    pub exited: Exited,
}

/// Opens connections to a guest.
#[derive(Clone, Copy)]
pub(super) struct Host<'a>(pub(super) &'a GuestAddress);

// === impl Ran ===

impl Ran {
    /// Standard output as text, without trailing newline.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }
}

// === impl Host ===

impl Host<'_> {
    pub(super) async fn call(self, call: Call) -> HostEnd {
        self.0.call(call).await.expect("the guest takes calls")
    }

    pub(super) async fn exec(self, exec: Exec) -> Result<Ran, proto::Error> {
        let mut end = self.call(Call::Exec(exec)).await;
        finish(&mut end).await
    }

    /// A call, with all its replies up to the last.
    pub(super) async fn done(self, call: Call) -> Result<Vec<Reply>, proto::Error> {
        let mut end = self.call(call).await;
        let mut replies = Vec::new();
        loop {
            match end.replies.next().await.expect("a reply") {
                Reply::Error(error) => return Err(error),
                reply @ (Reply::Done(_) | Reply::Hello(_)) => {
                    replies.push(reply);
                    return Ok(replies);
                }
                reply => replies.push(reply),
            }
        }
    }

    pub(super) async fn write(self, path: &str, data: &[u8]) -> Result<(), proto::Error> {
        let request = proto::WriteFile {
            root: Bytes::from_static(ROOT),
            path: bytes(path),
            ..Default::default()
        };
        let mut end = self.call(Call::WriteFile(request)).await;
        for chunk in data.chunks(k8e_wire::CHUNK_BYTES) {
            let sent = input::Input::Data(Bytes::copy_from_slice(chunk));
            // A guest that refused closes the input; its reply has the reason.
            if end.inputs.send(sent).await.is_err() {
                break;
            }
        }
        let _ = end.inputs.send(input::Input::End(proto::End {})).await;
        match end.replies.next().await.expect("a reply") {
            Reply::Done(_) => Ok(()),
            Reply::Error(error) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    pub(super) async fn read(self, path: &str) -> Result<Vec<u8>, proto::Error> {
        let request = proto::ReadFile {
            root: Bytes::from_static(ROOT),
            path: bytes(path),
            ..Default::default()
        };
        let mut data = Vec::new();
        for reply in self.done(Call::ReadFile(request)).await? {
            if let Reply::Data(more) = reply {
                data.extend_from_slice(&more);
            }
        }
        Ok(data)
    }

    /// Command lines of the sandbox's processes.
    pub(super) async fn processes(self) -> Vec<String> {
        let replies = self
            .done(Call::ListProcesses(proto::ListProcesses {}))
            .await;
        let lists = replies.expect("processes can be listed").into_iter();
        lists
            .filter_map(|reply| match reply {
                Reply::Processes(list) => Some(list.processes),
                _ => None,
            })
            .flatten()
            .filter(|process| process.state != "Z")
            .map(|process| String::from_utf8_lossy(&process.cmdline).replace('\0', " "))
            .collect()
    }

    /// Number of `sleep` processes with this argument.
    pub(super) async fn count(self, seconds: &str) -> usize {
        let processes = self.processes().await;
        let sleep = format!("sleep {seconds}");
        processes.iter().filter(|line| **line == sleep).count()
    }

    /// Waits until there are `count` of them.
    pub(super) async fn wait_for(self, seconds: &str, count: usize) {
        for _ in 0..1000 {
            if self.count(seconds).await == count {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("not {count} sleep {seconds}: {:#?}", self.processes().await);
    }
}

/// Reads the replies of a command up to its exit status.
pub(super) async fn finish(end: &mut HostEnd) -> Result<Ran, proto::Error> {
    let mut ran = Ran::default();
    loop {
        match end.replies.next().await.expect("a reply") {
            Reply::Started(_) => {}
            Reply::Stdout(data) => ran.stdout.extend_from_slice(&data),
            Reply::Stderr(data) => ran.stderr.extend_from_slice(&data),
            Reply::Exited(exited) => {
                ran.exited = exited;
                return Ok(ran);
            }
            Reply::Error(error) => return Err(error),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn sh(script: &str) -> Exec {
    argv(&["sh", "-c", script])
}

pub(super) fn argv(args: &[&str]) -> Exec {
    Exec {
        program: Some(Program::Argv(Argv {
            args: args.iter().map(|arg| bytes(arg)).collect(),
        })),
        cwd: Bytes::from_static(ROOT),
        ..Exec::default()
    }
}

pub(super) fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}
