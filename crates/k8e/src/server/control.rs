//! `k8e server stop`, `status` and `restart`: the server that holds the lock of a data directory.
//!
//! Stopping is SIGTERM: the server drains its calls and exits, and sandboxes keep running until the next one adopts them.

use super::lock;
use clap::{Args, Subcommand};
use k8e_cli::Globals;
use k8e_cli::units::{self, Span};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(20);

/// Exit code: no server runs, or it could not be stopped.
const EXIT_FAILED: u8 = 1;

/// The commands of `k8e server`.
#[derive(Subcommand, Debug)]
pub(crate) enum ServerCommand {
    /// Stop the server of the data directory; its sessions keep running
    Stop(StopArgs),
    /// Show whether a server runs on the data directory
    Status,
    /// Stop the server and start it in the background with the same flags; its sessions keep running
    Restart(StopArgs),
}

/// Arguments of `k8e server stop` and `restart`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
The server finishes the calls in progress; commands in sandboxes go on, and the next server adopts them.
A server that systemd started is left to systemctl.

Output:
  {\"ok\":true,\"running\":false,\"pid\":4711}
  pid is that of the server that was stopped, or of the restarted one; there is none if none ran.

Examples:
  sudo k8e server stop
  sudo k8e server restart --data-dir /srv/k8e")]
pub(crate) struct StopArgs {
    /// Longest wait until the server has exited; it goes on stopping afterwards
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = units::span)]
    timeout: Span,
}

/// A server that runs.
struct Running {
    pid: Pid,
    /// Signals reach this process only, also when the pid is used again.
    handle: OwnedFd,
    lock: File,
}

/// What a restarted server is given.
struct Invocation {
    args: Vec<OsString>,
    /// Environment variables of k8e.
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
}

type Failed = (String, &'static str);

/// Runs the command and prints one JSON object.
pub(crate) fn run(globals: &Globals, command: &ServerCommand) -> ExitCode {
    let result = match command {
        ServerCommand::Stop(args) => stop(globals, args),
        ServerCommand::Status => status(globals),
        ServerCommand::Restart(args) => restart(globals, args),
    };
    match result {
        Ok((value, code)) => k8e_cli::print(format!("{value}\n").as_bytes(), code),
        Err((error, detail)) => k8e_cli::fail(&error, detail),
    }
}

fn status(globals: &Globals) -> Result<(Value, u8), Failed> {
    let data_dir = globals.data_dir.display().to_string();
    let Some(server) = find(globals)? else {
        let value = json!({ "ok": true, "running": false, "data_dir": data_dir });
        return Ok((value, EXIT_FAILED));
    };
    let pid = server.pid.as_raw_nonzero().get();
    let value = json!({
        "ok": true,
        "running": true,
        "pid": pid,
        "data_dir": data_dir,
        "socket": socket(globals, &server).display().to_string(),
        "autostarted": lock::is_autostarted(server.pid),
        "managed_by": managed_by(server.pid),
    });
    Ok((value, 0))
}

fn stop(globals: &Globals, args: &StopArgs) -> Result<(Value, u8), Failed> {
    let Some(server) = find(globals)? else {
        return Ok((json!({ "ok": true, "running": false }), 0));
    };
    let pid = server.pid.as_raw_nonzero().get();
    end(&server, args)?;
    Ok((json!({ "ok": true, "running": false, "pid": pid }), 0))
}

fn restart(globals: &Globals, args: &StopArgs) -> Result<(Value, u8), Failed> {
    let Some(server) = find(globals)? else {
        let error = format!(
            "no server runs on {}: start one with `k8e server`",
            globals.data_dir.display()
        );
        return Err((error, "not_found"));
    };
    let socket = socket(globals, &server);
    // Before it ends: its arguments end with it.
    let invocation = Invocation::of(server.pid).map_err(|e| {
        let error = format!("cannot read the arguments of the server: {e}; it was not stopped");
        (error, "local")
    })?;
    end(&server, args)?;
    drop(server);
    let started = k8e_cli::start_server(&globals.data_dir, &socket, |command| {
        command
            .args(&invocation.args)
            .envs(invocation.env)
            .current_dir(&invocation.cwd);
    });
    let pid = started.map_err(|error| (error, "restart"))?;
    Ok((json!({ "ok": true, "running": true, "pid": pid }), 0))
}

/// The server that holds the lock; `None` when it is free.
fn find(globals: &Globals) -> Result<Option<Running>, Failed> {
    let path = globals.data_dir.join("lock");
    let failed = |e: &io::Error| {
        let hint = match e.kind() == io::ErrorKind::PermissionDenied {
            true => ": only root may, use sudo",
            false => "",
        };
        (
            format!("cannot read {}: {e}{hint}", path.display()),
            "local",
        )
    };
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(&e)),
    };
    if !lock::is_held(&file).map_err(|e| failed(&e))? {
        return Ok(None);
    }
    let pid = lock::read_pid(&mut file).and_then(lock::pid);
    // Opened before anything is checked, so that a process that reuses the pid is not signalled.
    let server = pid.and_then(|pid| {
        let handle = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        lock::holds(pid, &file).then_some((pid, handle))
    });
    match server {
        Some((pid, handle)) => Ok(Some(Running {
            pid,
            handle,
            lock: file,
        })),
        None => {
            let error = format!(
                "{} is held, but not by a server that runs: another one is starting or ending, repeat the command",
                path.display()
            );
            Err((error, "unavailable"))
        }
    }
}

/// Asks the server to stop, and waits until all processes that hold its lock have exited.
fn end(server: &Running, args: &StopArgs) -> Result<(), Failed> {
    let pid = server.pid.as_raw_nonzero();
    if let Some(unit) = managed_by(server.pid) {
        let error =
            format!("the server (pid {pid}) belongs to systemd: use `systemctl` with {unit}");
        return Err((error, "precondition"));
    }
    pidfd_send_signal(&server.handle, Signal::TERM)
        .map_err(|e| (format!("cannot stop the server (pid {pid}): {e}"), "local"))?;
    let deadline = match args.timeout {
        Span::For(time) => Some(Instant::now() + time),
        Span::Never => None,
    };
    while lock::is_held(&server.lock).unwrap_or(true) {
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            let error = format!(
                "the server (pid {pid}) still finishes calls: it stops when they end, or raise --timeout"
            );
            return Err((error, "timeout"));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// The systemd unit whose main process this is: systemd tells a process so by its environment.
fn managed_by(pid: Pid) -> Option<String> {
    let environ = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
    let own = format!("SYSTEMD_EXEC_PID={}", pid.as_raw_nonzero());
    let is_main = environ
        .split(|byte| *byte == 0)
        .any(|pair| pair == own.as_bytes());
    if !is_main {
        return None;
    }
    let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero())).ok()?;
    let unit = |line: &str| {
        line.split('/')
            .rev()
            .find(|part| part.ends_with(".service"))
            .map(str::to_owned)
    };
    Some(
        cgroup
            .lines()
            .find_map(unit)
            .unwrap_or_else(|| "its unit".to_owned()),
    )
}

/// The socket that the server listens on: --socket of its command line, or the one in the data directory.
fn socket(globals: &Globals, server: &Running) -> PathBuf {
    let default = globals.data_dir.join("k8e.sock");
    let Ok(invocation) = Invocation::of(server.pid) else {
        return default;
    };
    let mut args = invocation.args.into_iter();
    while let Some(arg) = args.next() {
        let bytes = arg.into_vec();
        if bytes == b"--socket" {
            return args
                .next()
                .map_or(default, |path| invocation.cwd.join(path));
        }
        if let Some(path) = bytes.strip_prefix(b"--socket=") {
            return invocation.cwd.join(OsString::from_vec(path.to_vec()));
        }
    }
    default
}

// === impl Invocation ===

impl Invocation {
    fn of(pid: Pid) -> io::Result<Self> {
        let dir = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let words = |name: &str| -> io::Result<Vec<OsString>> {
            let text = std::fs::read(dir.join(name))?;
            let text = text.strip_suffix(b"\0").unwrap_or(&text);
            let words = text.split(|byte| *byte == 0);
            Ok(words
                .map(|word| OsString::from_vec(word.to_vec()))
                .collect())
        };
        let args = words("cmdline")?;
        if args.len() < 2 {
            return Err(io::ErrorKind::NotFound.into());
        }
        let env = words("environ")?.into_iter().filter_map(|pair| {
            let pair = pair.into_vec();
            let at = pair.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (&pair[..at], &pair[at + 1..]);
            let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
            name.starts_with(b"K8E_").then(|| (os(name), os(value)))
        });
        Ok(Self {
            args: args.into_iter().skip(1).collect(),
            env: env.collect(),
            cwd: std::fs::read_link(dir.join("cwd"))?,
        })
    }
}
