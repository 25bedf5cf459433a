//! Who removes a cluster when whoever started it is gone: killed, stopped with Ctrl-C, or a test
//! whose cluster is in a static that nobody drops.
//!
//! A shell holds the other end of a pipe from us. When the pipe closes, for whatever reason, it
//! runs `down.sh`; unless it was told a word before, which means that the cluster stays.

use crate::{Error, error, sys};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// How a cluster is removed.
const DOWN: &str = include_str!("down.sh");

/// The process that waits for our end.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
}

/// Removes the cluster in `dir`; nothing happens when there is none.
pub(crate) fn remove(dir: &Path) -> Result<(), Error> {
    crate::service::output(shell(DOWN, dir).stdin(Stdio::null())).map(drop)
}

// === impl Keeper ===

impl Keeper {
    /// Sees to it that the cluster in `dir` does not outlive us.
    pub(crate) fn start(dir: &Path) -> Result<Self, Error> {
        let script = format!("read -r word && exit 0\n{DOWN}");
        let child = sys::own_session(shell(&script, dir).stdin(Stdio::piped()))
            .spawn()
            .map_err(|source| Error::Start {
                program: "sh".to_owned(),
                source,
            })?;
        Ok(Self { child })
    }

    /// Leaves the cluster as it is.
    pub(crate) fn dismiss(mut self) -> Result<(), Error> {
        if let Some(mut pipe) = self.child.stdin.take() {
            pipe.write_all(b"stay\n")
                .map_err(error::file("write to", "the keeper"))?;
        }
        self.wait()
    }

    /// Has the cluster removed, and waits for it.
    pub(crate) fn remove(mut self) -> Result<(), Error> {
        drop(self.child.stdin.take());
        self.wait()
    }

    fn wait(&mut self) -> Result<(), Error> {
        let status = self
            .child
            .wait()
            .map_err(error::file("wait for", "the keeper"))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Command {
            command: "down.sh".to_owned(),
            status,
            stderr: "see above".to_owned(),
        })
    }
}

fn shell(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("sh");
    // Nothing of our environment: above all not the mark, by which it would find itself.
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["-c", script, "kube-keeper"])
        .arg(dir)
        .current_dir("/")
        .stdout(Stdio::null());
    command
}
