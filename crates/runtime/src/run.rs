//! Runs a command to its end and keeps what it said, within bounds.

use crate::agent::{Failure, next};
use crate::shared::Shared;
use k8e_wire::proto::{ErrorCode, Exec, Exited, reply::Reply, request::Call};

/// How a command ended, and what of its output is kept.
pub(crate) struct Finished {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exited: Exited,
}

/// Runs a command. Dropping this kills it and all it started.
pub(crate) async fn run(shared: &Shared, exec: Exec) -> Result<Finished, Failure> {
    let running = shared.admit()?;
    let mut end = shared.agent.start(Call::Exec(exec)).await?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "any other reply is out of turn, also one that does not exist yet"
        )]
        match next(&mut end.replies).await? {
            Reply::Started(started) => running.process.set_pid(started.pid),
            Reply::Stdout(data) => stdout.extend_from_slice(&data),
            Reply::Stderr(data) => stderr.extend_from_slice(&data),
            Reply::Exited(exited) => {
                return Ok(Finished {
                    stdout,
                    stderr,
                    exited,
                });
            }
            _ => {
                let message = "the agent answered a command with something else";
                return Err(Failure::new(ErrorCode::Io, message));
            }
        }
    }
}

// === impl Finished ===

impl Finished {
    /// Cuts both streams so that they fit into so many bytes together: first what standard error has
    /// beyond a quarter, then standard output.
    pub(crate) fn fit(&mut self, bytes_max: usize) {
        let stderr_max = (bytes_max / 4).max(bytes_max.saturating_sub(self.stdout.len()));
        self.stderr.truncate(stderr_max);
        self.stdout.truncate(bytes_max - self.stderr.len());
    }

    /// What to tell about output that is not here; none when all is.
    pub(crate) fn cut_notice(&self) -> Option<String> {
        let cut = |name: &str, kept: &[u8], written: u64| {
            let kept = kept.len();
            ((kept as u64) < written)
                .then(|| format!("{name} was cut: {kept} of {written} bytes are here"))
        };
        let streams = [
            cut("stdout", &self.stdout, self.exited.stdout_bytes),
            cut("stderr", &self.stderr, self.exited.stderr_bytes),
        ];
        let told: Vec<String> = streams.into_iter().flatten().collect();
        let rest = "write to a file and read that, or stream it";
        (!told.is_empty()).then(|| format!("k8e-runtime: {}; {rest}\n", told.join(", ")))
    }
}

/// Adds a line to what a command said.
pub(crate) fn add_line(text: &mut Vec<u8>, line: &str) {
    if !matches!(text.last(), None | Some(b'\n')) {
        text.push(b'\n');
    }
    text.extend_from_slice(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(stdout: usize, stderr: usize) -> Finished {
        Finished {
            stdout: vec![b'o'; stdout],
            stderr: vec![b'e'; stderr],
            exited: Exited {
                stdout_bytes: stdout as u64,
                stderr_bytes: stderr as u64,
                ..Exited::default()
            },
        }
    }

    #[test]
    fn output_is_cut_to_fit_and_that_is_told() {
        for (stdout, stderr, kept) in [
            (100, 0, (100, 0)),
            (50, 50, (50, 50)),
            (10, 200, (10, 90)),
            (200, 10, (90, 10)),
            (200, 200, (75, 25)),
        ] {
            let mut finished = finished(stdout, stderr);
            finished.fit(100);
            assert_eq!((finished.stdout.len(), finished.stderr.len()), kept);
            let told = finished.cut_notice();
            assert_eq!(told.is_some(), kept != (stdout, stderr), "{told:?}");
        }
    }
}
