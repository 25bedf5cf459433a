//! A command to run in a sandbox, and its result.

use crate::{Env, Error, Flow, Language, LimitKind, TimeLimit};
use bytes::Bytes;
use std::time::Duration;

/// Largest code of a run, since it is sent in one message. Larger programs are written to a file first.
pub const CODE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Default timeout of a run, as `sandbox.v1` clients expect.
pub const RUN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Bounds of a request; the kernel's own for `execve` are larger.
const ARGS_MAX: usize = 4096;
const ARGS_BYTES_MAX: usize = 1024 * 1024;
const CWD_BYTES_MAX: usize = 4096;
const USER_BYTES_MAX: usize = 64;

/// What to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// A program and its arguments, without a shell.
    Argv(Vec<Bytes>),
    /// Code for a language's interpreter.
    Code {
        /// Language of the code.
        language: Language,
        /// The code, which need not be UTF-8. Shared: a clone copies nothing.
        code: Bytes,
    },
}

/// A validated command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// What to execute.
    pub program: Program,
    /// Environment variables, in addition to those of the session.
    pub env: Env,
    /// Working directory, absolute; `None` is the workspace.
    pub cwd: Option<String>,
    /// User name or uid in the sandbox; `None` is root.
    pub user: Option<String>,
    /// How long it may take; the engine fills in the default.
    pub timeout: TimeLimit,
    /// Bytes of each stream that are delivered; `None` is all, with backpressure.
    pub output_bytes_max: Option<u64>,
    /// Whether standard input follows.
    pub stdin: bool,
}

/// Status of an ended run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// It ended by itself, whatever its exit code.
    Completed,
    /// Killed at its timeout, with all processes it started.
    TimedOut,
    /// Killed because the sandbox reached its memory limit.
    OomKilled,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code; 128+n for signal n.
    pub exit_code: i32,
    /// Signal that ended it; 0 for none.
    pub signal: i32,
    /// Its status.
    pub status: RunStatus,
    /// Run time, as the guest measured it.
    pub duration: Duration,
    /// Bytes written to this stream, delivered or not.
    pub stdout_bytes: u64,
    /// Bytes written to this stream, delivered or not.
    pub stderr_bytes: u64,
    /// Whether some bytes of this stream were not delivered.
    pub stdout_truncated: bool,
    /// Whether some bytes of this stream were not delivered.
    pub stderr_truncated: bool,
    /// Limits that were hit while it ran.
    pub limits_hit: Vec<LimitKind>,
    /// Egress of its sandbox that was denied during the run.
    pub egress_denied: Vec<Flow>,
}

// === impl Command ===

impl Command {
    /// A command with nothing but its program; the rest is set by the caller.
    pub fn new(program: Program) -> Result<Self, Error> {
        match &program {
            Program::Code { code, .. } => check_code(code)?,
            Program::Argv(args) => check_argv(args)?,
        }
        Ok(Self {
            program,
            env: Env::default(),
            cwd: None,
            user: None,
            timeout: TimeLimit::Default,
            output_bytes_max: None,
            stdin: false,
        })
    }

    /// Sets the working directory; empty is the workspace.
    pub fn in_dir(mut self, cwd: &str) -> Result<Self, Error> {
        if !cwd.is_empty() {
            if !cwd.starts_with('/') || cwd.len() > CWD_BYTES_MAX || cwd.contains('\0') {
                return Err(Error::invalid(format!(
                    "working directory must be an absolute path of at most {CWD_BYTES_MAX} bytes without NUL"
                )));
            }
            self.cwd = Some(cwd.to_owned());
        }
        Ok(self)
    }

    /// Sets the user; empty is root.
    pub fn as_user(mut self, user: &str) -> Result<Self, Error> {
        if !user.is_empty() {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if user.len() > USER_BYTES_MAX || !user.chars().all(plain) {
                return Err(Error::invalid(
                    "user must be a user name or number inside the sandbox",
                ));
            }
            self.user = Some(user.to_owned());
        }
        Ok(self)
    }
}

// === impl RunStatus ===

impl RunStatus {
    /// As in responses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::TimedOut => "timed_out",
            Self::OomKilled => "oom_killed",
        }
    }
}

/// Whether code can be sent to a sandbox: not empty, and within [`CODE_BYTES_MAX`].
pub fn check_code(code: &[u8]) -> Result<(), Error> {
    if code.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::invalid(
            "no code to run: pass it as an argument or on standard input",
        ));
    }
    if code.len() > CODE_BYTES_MAX {
        return Err(Error::invalid(format!(
            "code is {} bytes, at most {CODE_BYTES_MAX} are allowed: write it to a file with `k8e sandbox write` and run that",
            code.len()
        )));
    }
    Ok(())
}

/// Whether a program and its arguments can be sent to a sandbox: a name, bounds of the request, no NUL.
pub fn check_argv(args: &[Bytes]) -> Result<(), Error> {
    let total: usize = args.iter().map(Bytes::len).sum();
    if args.first().is_none_or(Bytes::is_empty) {
        return Err(Error::invalid(
            "no command to run: give a program and its arguments",
        ));
    }
    if args.len() > ARGS_MAX || total > ARGS_BYTES_MAX {
        return Err(Error::invalid(format!(
            "{} arguments of {total} bytes in all, at most {ARGS_MAX} of {ARGS_BYTES_MAX} bytes are allowed",
            args.len()
        )));
    }
    if args.iter().any(|arg| arg.contains(&0)) {
        return Err(Error::invalid(
            "an argument contains NUL, which no program can receive",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(code: &[u8]) -> Result<Command, Error> {
        Command::new(Program::Code {
            language: Language::Bash,
            code: Bytes::copy_from_slice(code),
        })
    }

    #[test]
    fn programs_are_checked() {
        assert!(code(b"echo hi").is_ok());
        assert!(code(b"").unwrap_err().message.contains("no code"));
        assert!(code(b" \n").unwrap_err().message.contains("no code"));
        assert!(
            code(&vec![b'x'; CODE_BYTES_MAX + 1])
                .unwrap_err()
                .message
                .contains("sandbox write")
        );
        assert!(Command::new(Program::Argv(vec![])).is_err());
        assert!(Command::new(Program::Argv(vec![Bytes::new()])).is_err());
        assert!(Command::new(Program::Argv(vec!["a\0b".into()])).is_err());
        assert!(Command::new(Program::Argv(vec!["a".into(); ARGS_MAX + 1])).is_err());
    }

    #[test]
    fn cwd_and_user_are_checked() {
        let ok = code(b"x")
            .unwrap()
            .in_dir("/tmp")
            .unwrap()
            .as_user("nobody")
            .unwrap();
        assert_eq!(
            (ok.cwd.as_deref(), ok.user.as_deref()),
            (Some("/tmp"), Some("nobody"))
        );
        assert!(code(b"x").unwrap().in_dir("tmp").is_err());
        assert!(code(b"x").unwrap().as_user("a:b").is_err());
    }
}
