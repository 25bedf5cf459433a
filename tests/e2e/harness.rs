//! For end-to-end tests: a real `k8e server` with a data directory of its own, and its command line.
//!
//! Needs root and the built binary: `cargo xtask test -p k8e-e2e` (or `ci`) sets `K8E_BIN`.

pub mod internet;

use internet::{Internet, Namespace};
use serde_json::Value;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a server to answer, on a machine that runs other tests as well.
const START_WAIT: Duration = Duration::from_secs(60);

/// A server under test. Dropping it ends its sessions and removes everything.
#[derive(Debug)]
pub struct Server {
    dir: tempfile::TempDir,
    data: PathBuf,
    process: Option<Child>,
    flags: Vec<String>,
    /// Where it runs; nothing for the network of the machine.
    network: Option<Namespace>,
    /// Programs that it finds in `/usr/local/sbin`, before those of the machine.
    programs: Option<PathBuf>,
    /// How many descriptors it may have open, if not as many as we.
    descriptors: Option<u32>,
}

/// How a command of `k8e` ended.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code; 128+n for a signal.
    pub code: i32,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it said.
    pub stderr: Vec<u8>,
}

/// A session on a [`Server`].
#[derive(Debug)]
pub struct Session<'a> {
    /// Where it lives.
    pub server: &'a Server,
    /// Its id.
    pub id: String,
}

// === impl Server ===

impl Server {
    /// Starts one and waits until it answers.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one with more flags.
    pub fn start_with(flags: &[&str]) -> Self {
        Self::start_at(None, flags, None)
    }

    /// Starts one on the host of a miniature internet.
    pub fn start_on(internet: &Internet, flags: &[&str]) -> Self {
        let upstream = internet.dns_upstream();
        let flags = [&["--dns-upstream", &upstream], flags].concat();
        Self::start_at(None, &flags, Some(internet.host().clone()))
    }

    /// Starts one whose data directory is `data`, which outlives it.
    pub fn start_in(data: &Path) -> Self {
        Self::start_at(Some(data), &[], None)
    }

    /// Starts one that finds the programs in `programs` before those of the machine.
    pub fn start_with_programs(programs: &Path, flags: &[&str]) -> Self {
        let mut server = Self::new(None, flags, None);
        server.programs = Some(programs.to_owned());
        server.restart();
        server
    }

    fn start_at(data: Option<&Path>, flags: &[&str], network: Option<Namespace>) -> Self {
        let mut server = Self::new(data, flags, network);
        server.restart();
        server
    }

    fn new(data: Option<&Path>, flags: &[&str], network: Option<Namespace>) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "this test needs root: real namespaces and cgroups"
        );
        let dir = passable_tempdir("k8e-e2e-");
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let data = data.map_or_else(|| dir.path().join("data"), Path::to_owned);
        Self {
            dir,
            data,
            process: None,
            flags,
            network,
            programs: None,
            descriptors: None,
        }
    }

    /// Starts the process again on the same data directory.
    pub fn restart(&mut self) {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .expect("a log file");
        let mut command = match (&self.programs, self.descriptors) {
            (Some(programs), _) => with_programs(programs),
            (None, Some(count)) => {
                let mut limited = Command::new("prlimit");
                limited
                    .arg(format!("--nofile={count}:{count}"))
                    .arg(binary());
                limited
            }
            (None, None) => Command::new(binary()),
        };
        command
            .args(["server", "--data-dir"])
            .arg(self.data_dir())
            .args(&self.flags);
        let has = |wanted: &str| self.flags.iter().any(|flag| flag == wanted);
        if !has("--listen") {
            command.args(["--listen", "none"]);
        }
        if !has("--expose-listen") {
            command.args(["--expose-listen", "none"]);
        }
        if !has("--e2b-listen") {
            command.args(["--e2b-listen", "none"]);
        }
        // Who counts traces wants those of sessions only.
        if !self.flags.iter().any(|flag| flag.starts_with("--pool")) {
            command.args(["--pool-min", "0", "--pool-max", "0"]);
        }
        // Most of what is tested is the same for all, and native is quick and claims most.
        if !has("--default-runtime") && !has("--gvisor-platform") {
            command.args(["--default-runtime", "native"]);
        }
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log);
        let mut start = || command.spawn().expect("k8e server starts");
        self.process = Some(match &self.network {
            Some(network) => network.run(start),
            None => start(),
        });
        let started = Instant::now();
        while self.k8e(&["sandbox", "status"]).code != 0 {
            assert!(
                started.elapsed() < START_WAIT,
                "the server does not answer; its log:\n{}",
                self.log_text()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the process again with other flags besides.
    pub fn restart_with(&mut self, flags: &[&str]) {
        self.flags
            .extend(flags.iter().map(|flag| (*flag).to_owned()));
        self.restart();
    }

    /// Starts the process again, with a hard limit for its descriptors.
    pub fn restart_with_descriptors(&mut self, count: u32) {
        self.stop();
        self.descriptors = Some(count);
        self.restart();
    }

    /// Where it keeps its sandboxes.
    pub fn runtime_dir(&self) -> PathBuf {
        let gvisor = self.flags.iter().any(|flag| flag.contains("gvisor"));
        let runtime = if gvisor { "gvisor" } else { "native" };
        self.data_dir().join(runtime)
    }

    /// Where it keeps everything.
    pub fn data_dir(&self) -> PathBuf {
        self.data.clone()
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.data_dir().join("k8e.sock")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("the server runs").id()
    }

    /// Ends it the hard way.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("the server can be killed");
            process.wait().expect("a killed process ends");
        }
    }

    /// Ends it the friendly way.
    pub fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let pid = rustix::process::Pid::from_child(&process);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)
                .expect("the server can be signalled");
            process.wait().expect("a stopped process ends");
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// What it logged.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// A command of `k8e` against this server.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(args).env(
            "K8E_SANDBOX_ENDPOINT",
            format!("unix://{}", self.socket().display()),
        );
        command
            .env("K8E_NO_AUTOSTART", "1")
            .env_remove("K8E_SANDBOX_SESSION_ID")
            .env_remove("K8E_SANDBOX_TENANT");
        command
    }

    /// Runs a command of `k8e` to its end.
    pub fn k8e(&self, args: &[&str]) -> Ran {
        ran(self
            .command(args)
            .stdin(Stdio::null())
            .output()
            .expect("k8e runs"))
    }

    /// Runs a command of `k8e` with standard input.
    pub fn k8e_with(&self, args: &[&str], stdin: &[u8]) -> Ran {
        let mut command = self.command(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("k8e runs");
        let mut pipe = child.stdin.take().expect("a pipe");
        let data = stdin.to_vec();
        // A command that fails early closes the pipe; its error is what counts.
        let writer = std::thread::spawn(move || drop(pipe.write_all(&data)));
        let output = child.wait_with_output().expect("k8e ends");
        writer.join().expect("the writer ends");
        ran(output)
    }

    /// A new session.
    pub fn session(&self) -> Session<'_> {
        self.session_with(&[])
    }

    /// A new session with more flags.
    pub fn session_with(&self, flags: &[&str]) -> Session<'_> {
        let made = self.k8e(&[&["sandbox", "create"], flags].concat());
        assert_eq!(made.code, 0, "create: {}", made.all());
        let id = made.json()["session_id"]
            .as_str()
            .expect("an id")
            .to_owned();
        Session { server: self, id }
    }

    /// Ids of the live sessions.
    pub fn session_ids(&self) -> Vec<String> {
        self.ids_in("active")
    }

    fn ids_in(&self, phase: &str) -> Vec<String> {
        let listed = self.k8e(&["sandbox", "sessions", "--phase", phase]).json();
        let sessions = listed["sessions"].as_array().cloned().unwrap_or_default();
        sessions
            .iter()
            .filter_map(|session| Some(session["session_id"].as_str()?.to_owned()))
            .collect()
    }

    /// Everything of this server's that the machine still holds: directories, cgroups, loop devices, processes.
    pub fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        let sandboxes = self.runtime_dir().join("sandboxes");
        traces.extend(
            names(&sandboxes)
                .into_iter()
                .map(|name| format!("directory {name}")),
        );
        for group in self.cgroups() {
            traces.extend(
                dirs(&group)
                    .into_iter()
                    .map(|name| format!("cgroup {}/{name}", group.display())),
            );
        }
        let backing = |device: &String| {
            let file = Path::new("/sys/block")
                .join(device)
                .join("loop/backing_file");
            std::fs::read_to_string(file).unwrap_or_default()
        };
        let ours = within_file_system(&self.runtime_dir());
        let loops = names(Path::new("/sys/block"))
            .into_iter()
            .filter(|name| name.starts_with("loop"));
        traces.extend(
            loops
                .filter(|device| backing(device).contains(&ours))
                .map(|device| format!("loop device {device}")),
        );
        traces
    }

    /// Waits until no trace is left but those of `live` sessions (a directory, its cgroups and a loop device each).
    pub fn assert_traces(&self, live: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let traces = self.traces();
            let count = |kind: &str| {
                traces
                    .iter()
                    .filter(|trace| trace.starts_with(kind))
                    .count()
            };
            let groups = self.cgroups().len();
            if count("directory") == live
                && count("cgroup") == live * groups
                && count("loop device") == live
            {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{live} live sessions, but these traces: {traces:#?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// This server's cgroups, one for each hierarchy: those that hold a sandbox of its, or are named after its directory.
    fn cgroups(&self) -> Vec<PathBuf> {
        let name = stable_name(&self.runtime_dir());
        let controllers = ["", "memory", "cpu", "pids", "freezer", "devices", "blkio"];
        let roots = controllers.map(|sub| {
            Path::new("/sys/fs/cgroup")
                .join(sub)
                .join("k8e")
                .join(&name)
        });
        roots.into_iter().filter(|dir| dir.is_dir()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process.is_none() && self.runtime_dir().join("sandboxes").exists() {
            self.restart();
        }
        for id in self.ids_in("paused").into_iter().chain(self.session_ids()) {
            self.k8e(&["sandbox", "destroy", &id]);
        }
        self.stop();
        if std::thread::panicking() {
            eprint_log(&self.log_text());
        }
    }
}

// === impl Session ===

impl Session<'_> {
    /// Runs a shell script in it, as root.
    pub fn sh(&self, script: &str) -> Ran {
        self.run(&["--timeout", "60"], script)
    }

    /// Runs Python in it, as root.
    pub fn py(&self, script: &str) -> Ran {
        self.run(&["--timeout", "60", "--lang", "python"], script)
    }

    /// Runs code in it with more flags of `run`, its streams as they are.
    pub fn run(&self, flags: &[&str], code: &str) -> Ran {
        let args = [
            &["sandbox", "run", "--raw", "--session-id", &self.id],
            flags,
        ]
        .concat();
        self.server.k8e_with(&args, code.as_bytes())
    }

    /// Runs code and returns the JSON answer.
    pub fn run_json(&self, flags: &[&str], code: &str) -> Value {
        let args = [&["sandbox", "run", "--session-id", &self.id], flags].concat();
        self.server.k8e_with(&args, code.as_bytes()).json()
    }

    /// Ends it.
    pub fn destroy(&self) {
        let ran = self.server.k8e(&["sandbox", "destroy", &self.id]);
        assert_eq!(ran.code, 0, "{}", ran.all());
    }
}

// === impl Ran ===

impl Ran {
    /// What it printed, as text.
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// What it said, as text.
    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Everything, for a failed assertion.
    pub fn all(&self) -> String {
        format!(
            "exit {}\n--- stdout\n{}\n--- stderr\n{}",
            self.code,
            self.out(),
            self.err()
        )
    }

    /// What it printed, as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.all()))
    }
}

/// The binary under test, in a mount namespace where `programs` is `/usr/local/sbin`.
fn with_programs(programs: &Path) -> Command {
    let script = r#"mount --bind "$0" /usr/local/sbin && exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    command.arg(programs).arg(binary());
    command
}

/// The binary under test.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("K8E_BIN")
        .expect("K8E_BIN names the built k8e: run the tests with `cargo xtask test`");
    PathBuf::from(path)
}

/// What `cargo xtask setup` made under this name.
pub fn tools(name: &str) -> PathBuf {
    let dir = std::env::var_os("K8E_TOOLS_DIR").expect("`cargo xtask test` sets K8E_TOOLS_DIR");
    let path = PathBuf::from(dir).join(name);
    let shown = path.display();
    assert!(path.exists(), "{shown} is missing: run `cargo xtask setup`");
    path
}

/// A temporary directory that every user may pass through: the server is not root for long.
pub fn passable_tempdir(prefix: &str) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt as _;
    tempfile::Builder::new()
        .prefix(prefix)
        .permissions(std::fs::Permissions::from_mode(0o711))
        .tempdir()
        .expect("a temporary directory")
}

/// Copies a program to where anybody may execute it, in a process of its own. Were it open for writing
/// in this one, a fork of another test's thread would hold it open until its `execve`, and running it
/// fail: text file busy.
pub fn install(from: &Path, to: &Path) {
    let mut install = Command::new("install");
    let status = install.args(["-m", "755"]).arg(from).arg(to).status();
    assert!(
        status.expect("install runs").success(),
        "install {} as {}",
        from.display(),
        to.display()
    );
}

fn ran(output: Output) -> Ran {
    use std::os::unix::process::ExitStatusExt as _;
    let code = output
        .status
        .code()
        .unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
    Ran {
        code,
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn dirs(dir: &Path) -> Vec<String> {
    names(dir)
        .into_iter()
        .filter(|name| dir.join(name).is_dir())
        .collect()
}

/// As the kernel names what is on a mount that only sandboxes' namespaces still show: from its root.
fn within_file_system(dir: &Path) -> String {
    use std::os::unix::fs::MetadataExt as _;
    let device = |dir: &Path| std::fs::metadata(dir).map(|meta| meta.dev()).ok();
    let on_it = |above: &&Path| device(above) == device(dir);
    let root = dir.ancestors().take_while(on_it).last().unwrap_or(dir);
    let path = dir.strip_prefix(root).unwrap_or(dir);
    Path::new("/").join(path).display().to_string()
}

/// As the native driver names its cgroups (FNV-1a of the directory).
fn stable_name(dir: &Path) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let hash = dir
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("{hash:016x}")
}

#[expect(
    clippy::print_stderr,
    reason = "shown by the test runner next to the failed assertion"
)]
fn eprint_log(log: &str) {
    eprintln!("--- server log\n{log}");
}
