//! One process of a cluster: started in a session of its own, with a log and a pid file.

use crate::{Error, error, sys};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// In the environment of every process of a cluster, with its directory: by this they are found
/// and ended, whatever became of whoever started them.
pub(crate) const MARK: &str = "K8E_KUBE_DIR";

/// Where programs find others: mount, ip, runc, runsc.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How much of a log is shown when its process died.
const TAIL_BYTES: usize = 4000;

/// How often a condition is looked at.
pub(crate) const POLL: Duration = Duration::from_millis(100);

/// A process that runs until it is killed.
#[derive(Debug)]
pub(crate) struct Service {
    name: &'static str,
    log: PathBuf,
    pid_file: PathBuf,
    child: Child,
}

/// A command with nothing of our own environment: no proxies, no settings of this person's.
pub(crate) fn clean_command(program: &Path, bin: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", format!("{}:{SYSTEM_PATH}", bin.display()))
        .env("HOME", home)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String, Error> {
    let output = command.output().map_err(|source| Error::Start {
        program: shown(command),
        source,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::Command {
        command: shown(command),
        status: output.status,
        stderr: tail_of(&output.stderr).trim().to_owned(),
    })
}

/// Looks until `look` has something; what it said last is in the error.
pub(crate) fn wait_for<T>(
    what: &str,
    at_most: Duration,
    mut look: impl FnMut() -> Result<Result<T, String>, Error>,
) -> Result<T, Error> {
    let started = Instant::now();
    loop {
        let last = match look()? {
            Ok(found) => return Ok(found),
            Err(last) => last,
        };
        if started.elapsed() > at_most {
            return Err(Error::TimedOut {
                what: what.to_owned(),
                seconds: at_most.as_secs(),
                last,
            });
        }
        std::thread::sleep(POLL);
    }
}

// === impl Service ===

impl Service {
    /// Starts `command`, which is marked as part of the cluster in `dir`.
    pub(crate) fn start(
        name: &'static str,
        dir: &Path,
        command: &mut Command,
    ) -> Result<Self, Error> {
        let log = dir.join(format!("{name}.log"));
        let pid_file = dir.join(format!("{name}.pid"));
        let file = append(&log)?;
        let stderr = file.try_clone().map_err(error::file("open", &log))?;
        command
            .env(MARK, dir)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(stderr);
        let child = sys::own_session(command)
            .spawn()
            .map_err(|source| Error::Start {
                program: command.get_program().to_string_lossy().into_owned(),
                source,
            })?;
        std::fs::write(&pid_file, format!("{}\n", child.id()))
            .map_err(error::file("write", &pid_file))?;
        Ok(Self {
            name,
            log,
            pid_file,
            child,
        })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails when the process has ended, with the end of its log.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        let ended = self
            .child
            .try_wait()
            .map_err(error::file("wait for", &self.pid_file))?;
        match ended {
            None => Ok(()),
            Some(status) => Err(Error::Died {
                service: self.name,
                status,
                log: self.log.clone(),
                tail: tail_of(&std::fs::read(&self.log).unwrap_or_default()),
            }),
        }
    }

    /// Kills the process, as a crash would, and waits for its end.
    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        let failed = |e| error::file("end the process of", &self.pid_file)(e);
        self.child.kill().map_err(failed)?;
        self.child
            .wait()
            .map_err(error::file("wait for", &self.pid_file))?;
        let _gone = std::fs::remove_file(&self.pid_file);
        Ok(())
    }

    /// Waits for a process that somebody else kills, so that nothing of it is left.
    pub(crate) fn reap(&mut self) {
        let _ended = self.child.wait();
    }
}

fn append(path: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    let options = options.create(true).append(true);
    options.open(path).map_err(error::file("open", path))
}

fn tail_of(bytes: &[u8]) -> String {
    let from = bytes.len().saturating_sub(TAIL_BYTES);
    String::from_utf8_lossy(&bytes[from..]).into_owned()
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
