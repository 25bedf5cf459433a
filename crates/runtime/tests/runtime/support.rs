//! Test harness: a runtime process, and a raw HTTP client.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Timeout of every step, generous for a busy machine.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);

/// Timeouts to try for a command that must do something before its timeout. The first is long enough, unless the
/// machine is busy.
pub(crate) const TIMEOUTS: [Duration; 4] = [
    Duration::from_millis(500),
    Duration::from_secs(4),
    Duration::from_secs(16),
    WITHIN,
];

/// A runtime process with temporary root directories.
pub(crate) struct Runtime {
    child: Child,
    _stderr: BufReader<std::process::ChildStderr>,
    pub(crate) legacy: SocketAddr,
    pub(crate) rest: SocketAddr,
    pub(crate) grpc: SocketAddr,
    dir: tempfile::TempDir,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

// === impl Runtime ===

impl Runtime {
    pub(crate) fn start() -> Self {
        Self::with(&[], &[])
    }

    pub(crate) fn with(flags: &[&str], env: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(program());
        command.args(arguments(dir.path())).args(flags);
        command
            .env("SANDBOX_BASE_DIR", dir.path().join("app"))
            .envs(env.iter().copied());
        Self::spawn(command, dir)
    }

    /// As PID 1 of a PID namespace, with a small file system as root directory. Needs root.
    pub(crate) fn as_init(flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("workspace");
        std::fs::create_dir(&root).unwrap();
        let script = "mount -t tmpfs -o size=1m tmpfs \"$1\" && shift && exec \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc", "--mount"])
            .args(["sh", "-c", script, "sh"])
            .arg(&root)
            .arg(program())
            .args(arguments(dir.path()))
            .args(flags)
            .env("SANDBOX_BASE_DIR", dir.path().join("app"));
        Self::spawn(command, dir)
    }

    /// As an unprivileged user without capabilities, as in a pod. Needs root to switch to it.
    pub(crate) fn as_nobody(env: &[(&str, &str)]) -> Self {
        const NOBODY: u32 = 65534;
        let dir = tempfile::tempdir().unwrap();
        // The unprivileged user cannot access the build directory.
        let copy = dir.path().join("k8e-runtime");
        install(&program(), &copy);
        std::os::unix::fs::chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        let mut command = Command::new(copy);
        command
            .args(arguments(dir.path()))
            .uid(NOBODY)
            .gid(NOBODY)
            .env_remove("USER")
            .envs(env.iter().copied())
            .env("SANDBOX_BASE_DIR", dir.path().join("app"));
        Self::spawn(command, dir)
    }

    fn spawn(mut command: Command, dir: tempfile::TempDir) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        stderr.read_line(&mut said).unwrap();
        let api = |name: &str| -> SocketAddr {
            let prefix = format!("{name}=");
            let found = said
                .split_whitespace()
                .find_map(|word| word.strip_prefix(&prefix));
            found
                .unwrap_or_else(|| panic!("no {name} in {said:?}"))
                .parse()
                .unwrap()
        };
        Self {
            legacy: api("legacy"),
            rest: api("rest"),
            grpc: api("grpc"),
            child,
            _stderr: stderr,
            dir,
        }
    }

    /// Root of sandboxd's API.
    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    /// Root of the legacy API.
    pub(crate) fn app(&self) -> PathBuf {
        self.dir.path().join("app")
    }

    /// A path outside of both roots.
    pub(crate) fn outside(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn legacy(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let headers = [("content-type", "application/json")];
        ask(self.legacy, method, path, &headers, body)
    }

    pub(crate) fn rest(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        ask(self.rest, method, path, &[], body)
    }

    /// `POST /execute`.
    pub(crate) fn execute(&self, request: &serde_json::Value) -> serde_json::Value {
        let answer = self.legacy("POST", "/execute", request.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub(crate) fn terminate(&self) {
        self.try_terminate().unwrap();
    }

    /// Sends SIGTERM as the kubelet does; with a wrapper process around PID 1, to the process inside.
    fn try_terminate(&self) -> Option<()> {
        let own = self.pid().as_raw_nonzero();
        let comm = std::fs::read_to_string(format!("/proc/{own}/comm")).ok()?;
        let pid = if comm.trim() == "unshare" {
            let children = format!("/proc/{own}/task/{own}/children");
            std::fs::read_to_string(children)
                .ok()?
                .trim()
                .parse()
                .ok()?
        } else {
            own.get()
        };
        let pid = rustix::process::Pid::from_raw(pid)?;
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).ok()
    }

    /// Waits until the process exits.
    pub(crate) fn wait(mut self) -> ExitStatus {
        let mut status = ExitStatus::from_raw(0);
        until("the runtime ends", || {
            match self.child.try_wait().unwrap() {
                Some(ended) => {
                    status = ended;
                    true
                }
                None => false,
            }
        });
        status
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // SIGTERM first: a runtime that is killed cannot end its commands.
        let begin = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && begin.elapsed() < Duration::from_secs(15)
        {
            self.try_terminate();
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// === impl Answer ===

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

fn arguments(dir: &Path) -> Vec<String> {
    let root = dir.join("workspace");
    vec![
        "-listen-host=127.0.0.1".to_owned(),
        "-legacy-port=0".to_owned(),
        "-rest-port=0".to_owned(),
        "-grpc-port=0".to_owned(),
        format!("--root-dir={}", root.display()),
    ]
}

/// The binary under test: the one that cargo built, or `K8E_RUNTIME_BIN`, the static one for images.
pub(crate) fn program() -> PathBuf {
    let built = std::env::var_os("K8E_RUNTIME_BIN").map(PathBuf::from);
    built.unwrap_or_else(|| env!("CARGO_BIN_EXE_k8e-runtime").into())
}

/// Copies a program with a child process. If this process had it open for writing, a fork in another test's thread
/// would inherit the descriptor until its `execve`, and running the copy would fail with ETXTBSY.
fn install(from: &Path, to: &Path) {
    let mut install = Command::new("install");
    let status = install.args(["-m", "755"]).arg(from).arg(to).status();
    assert!(status.unwrap().success(), "install {}", to.display());
}

/// Sends one request on a new connection.
pub(crate) fn ask(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    ask_host("sandbox", to, method, path, headers, body)
}

/// The same with another Host header.
pub(crate) fn ask_host(
    host: &str,
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut stream = connect(to);
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses early may close before it has read all.
    let _ = stream.write_all(body);
    read_answer(&mut stream)
}

pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    stream
}

/// Reads to the end of the connection.
pub(crate) fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut raw = Vec::new();
    // A reset after the response is expected.
    let _ = stream.read_to_end(&mut raw);
    let end = raw.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(&raw)));
    let head = String::from_utf8(raw[..end].to_vec()).unwrap();
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .unwrap()
        .split(' ')
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    let headers: Vec<(String, String)> = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let chunked = headers.iter().any(|(name, _)| name == "transfer-encoding");
    let body = raw.split_off(end + 4);
    let body = if chunked { unchunk(&body) } else { body };
    Answer {
        status,
        headers,
        body,
    }
}

fn unchunk(mut body: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = body.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        let data = &body[end + 2..];
        whole.extend_from_slice(&data[..size]);
        body = data.get(size + 2..).unwrap_or_default();
    }
    whole
}

/// A form with one file.
pub(crate) fn form(name: &str, filename: &str, content: &[u8]) -> (String, Vec<u8>) {
    let mut body = Vec::new();
    body.extend_from_slice(
        b"--XyZ\r\nContent-Disposition: form-data; name=\"note\"\r\n\r\nhello\r\n",
    );
    let head = format!(
        "--XyZ\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{filename}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(content);
    body.extend_from_slice(b"\r\n--XyZ--\r\n");
    ("multipart/form-data; boundary=XyZ".to_owned(), body)
}

/// Polls until a condition is true.
#[track_caller]
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < WITHIN, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The same without blocking other tasks, such as a client's connection.
pub(crate) async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < WITHIN, "waited too long: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether a process with this PID exists and is not a zombie.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|stat| {
        let state = stat.rsplit(')').next().unwrap_or_default();
        !matches!(state.trim_start().chars().next(), Some('Z' | 'X') | None)
    })
}
