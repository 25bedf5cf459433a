//! A guest in this process, and a host that makes calls.

use bytes::Bytes;
use k8e_wire::HostEnd;
use k8e_wire::proto::{
    self, Argv, Exec, Exited, FileInfo, exec::Program, input::Input, reply::Reply, request::Call,
};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;

/// Timeout of a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest and a temporary directory for its files.
pub(crate) struct Guest {
    socket: PathBuf,
    /// The root of file calls.
    pub(crate) root: PathBuf,
    _dir: tempfile::TempDir,
}

/// Result of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) pid: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exited: Exited,
}

/// Runs a test against a guest on one thread, as in a sandbox.
pub(crate) fn with_guest(test: impl AsyncFnOnce(Guest)) {
    with_listener(async |listener, guest| {
        let listener = UnixListener::from_std(listener).unwrap();
        let serve = tokio::spawn(k8e_guest::serve(
            listener,
            None,
            k8e_guest::Config::default(),
        ));
        test(guest).await;
        serve.abort();
    });
}

/// Runs a test that starts the guest itself.
pub(crate) fn with_listener(test: impl AsyncFnOnce(std::os::unix::net::UnixListener, Guest)) {
    assert!(
        rustix::process::geteuid().is_root(),
        "these tests run as root: they change users and owners"
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let (socket, root) = (dir.path().join("guest.sock"), dir.path().join("root"));
        std::fs::create_dir(&root).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let guest = Guest {
            socket,
            root,
            _dir: dir,
        };
        tokio::time::timeout(PATIENCE, test(listener, guest))
            .await
            .expect("the test hangs");
    });
}

/// A shell command.
pub(crate) fn sh(code: &str) -> Exec {
    argv(&["sh", "-c", code])
}

pub(crate) fn argv(args: &[&str]) -> Exec {
    let args = args
        .iter()
        .map(|arg| Bytes::copy_from_slice(arg.as_bytes()))
        .collect();
    Exec {
        program: Some(Program::Argv(Argv { args })),
        cwd: Bytes::from_static(b"/tmp"),
        ..Exec::default()
    }
}

/// An argument for `sleep` that is unique to a test.
pub(crate) fn marker() -> String {
    use std::hash::{BuildHasher as _, Hasher as _};
    format!(
        "61.{}",
        std::hash::RandomState::new().build_hasher().finish()
    )
}

/// Live processes with the marker among their arguments.
pub(crate) fn processes_with(marker: &str) -> Vec<i32> {
    let has = |pid: &i32| {
        let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        cmdline
            .split(|byte| *byte == 0)
            .any(|arg| arg == marker.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(has)
        .collect()
}

/// Waits until there are so many.
pub(crate) async fn wait_for_processes(marker: &str, count: usize) {
    for _ in 0..1000 {
        if processes_with(marker).len() == count {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{:?} processes instead of {count}", processes_with(marker));
}

pub(crate) fn path_bytes(path: &Path) -> Bytes {
    use std::os::unix::ffi::OsStrExt as _;
    Bytes::copy_from_slice(path.as_os_str().as_bytes())
}

impl Guest {
    pub(crate) async fn call(&self, call: Call) -> HostEnd {
        HostEnd::call(UnixStream::connect(&self.socket).unwrap(), call)
            .await
            .unwrap()
    }

    pub(crate) fn root_bytes(&self) -> Bytes {
        path_bytes(&self.root)
    }

    /// Runs a command to its end.
    pub(crate) async fn exec(&self, exec: Exec) -> Result<Ran, proto::Error> {
        finish(self.call(Call::Exec(exec)).await).await
    }

    /// A call with one reply.
    pub(crate) async fn one(&self, call: Call) -> Result<Reply, proto::Error> {
        let mut end = self.call(call).await;
        match end.replies.next().await.unwrap() {
            Reply::Error(error) => Err(error),
            reply => Ok(reply),
        }
    }

    pub(crate) async fn read(
        &self,
        path: &[u8],
        offset: u64,
        length: u64,
    ) -> Result<(FileInfo, Vec<u8>), proto::Error> {
        let path = Bytes::copy_from_slice(path);
        let request = proto::ReadFile {
            root: self.root_bytes(),
            path,
            offset,
            length,
        };
        let mut end = self.call(Call::ReadFile(request)).await;
        let info = match end.replies.next().await.unwrap() {
            Reply::File(info) => info,
            Reply::Error(error) => return Err(error),
            other => panic!("{other:?}"),
        };
        let mut data = Vec::new();
        loop {
            match end.replies.next().await.unwrap() {
                Reply::Data(more) => data.extend_from_slice(&more),
                Reply::Done(done) => {
                    assert_eq!(done.bytes, data.len() as u64);
                    return Ok((info, data));
                }
                Reply::Error(error) => return Err(error),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) async fn write(
        &self,
        path: &[u8],
        data: &[u8],
        append: bool,
        mode: u32,
    ) -> Result<u64, proto::Error> {
        let path = Bytes::copy_from_slice(path);
        let request = proto::WriteFile {
            root: self.root_bytes(),
            path,
            append,
            mode,
            user: String::new(),
        };
        let mut end = self.call(Call::WriteFile(request)).await;
        for chunk in data.chunks(k8e_wire::CHUNK_BYTES) {
            if end
                .inputs
                .send(Input::Data(Bytes::copy_from_slice(chunk)))
                .await
                .is_err()
            {
                break;
            }
        }
        let _ = end.inputs.send(Input::End(proto::End {})).await;
        match end.replies.next().await.unwrap() {
            Reply::Done(done) => Ok(done.bytes),
            Reply::Error(error) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    /// Entries, and the flag for a truncated list.
    pub(crate) async fn list(
        &self,
        request: proto::ListFiles,
    ) -> Result<(Vec<FileInfo>, bool), proto::Error> {
        let request = proto::ListFiles {
            root: self.root_bytes(),
            ..request
        };
        let mut end = self.call(Call::ListFiles(request)).await;
        let mut files = Vec::new();
        loop {
            match end.replies.next().await.unwrap() {
                Reply::Files(more) => {
                    assert!(!more.files.is_empty() && more.files.len() <= 256);
                    files.extend(more.files);
                }
                Reply::Done(done) => return Ok((files, done.truncated)),
                Reply::Error(error) => return Err(error),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Reads a command's replies to the end.
pub(crate) async fn finish(mut end: HostEnd) -> Result<Ran, proto::Error> {
    let (mut pid, mut stdout, mut stderr) = (0, Vec::new(), Vec::new());
    loop {
        match end.replies.next().await.unwrap() {
            Reply::Started(started) => pid = started.pid,
            Reply::Stdout(data) => stdout.extend_from_slice(&data),
            Reply::Stderr(data) => stderr.extend_from_slice(&data),
            Reply::Exited(exited) => {
                assert!(pid > 1, "ended without having started");
                assert!(
                    end.replies.next().await.is_err(),
                    "a reply after the final one"
                );
                return Ok(Ran {
                    pid,
                    stdout,
                    stderr,
                    exited,
                });
            }
            Reply::Error(error) => {
                assert_eq!(pid, 0, "an error after having started");
                return Err(error);
            }
            other => panic!("{other:?}"),
        }
    }
}
