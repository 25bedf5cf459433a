//! Runs a command to its end and collects its output, within limits.

use crate::agent::{Failure, next};
use crate::shared::Shared;
use k8e_wire::proto::{ErrorCode, Exec, Exited, reply::Reply, request::Call};

/// How a command ended, and the output that was kept.
pub(crate) struct Finished {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exited: Exited,
}

/// Runs a command. Dropping this future kills the command and all its descendants.
pub(crate) async fn run(shared: &Shared, exec: Exec) -> Result<Finished, Failure> {
    let running = shared.admit()?;
    let mut end = shared.agent.start(Call::Exec(exec)).await?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "any other reply is a protocol error, also a kind that is added later"
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
                let message = "the guest agent sent an unexpected reply to a command";
                return Err(Failure::new(ErrorCode::Io, message));
            }
        }
    }
}

// === impl Finished ===

impl Finished {
    /// Truncates both streams to `bytes_max` in total: first stderr beyond a quarter of it, then stdout.
    pub(crate) fn fit(&mut self, bytes_max: usize) {
        let stderr_max = (bytes_max / 4).max(bytes_max.saturating_sub(self.stdout.len()));
        self.stderr.truncate(stderr_max);
        self.stdout.truncate(bytes_max - self.stderr.len());
    }

    /// A notice about truncated output; `None` if it is complete.
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

/// Appends a line to the output of a command.
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
    fn output_is_truncated_to_fit_with_a_notice() {
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
