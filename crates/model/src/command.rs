//! One thing to run in a sandbox, and how it ended.

use crate::{Env, Error, Flow, Language, LimitKind};
use std::time::Duration;

/// Code that travels in one message. More than that is a file: write it, then run it.
pub const CODE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// What a run may take when nobody says, as K8E's clients expect.
pub const RUN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// The kernel's own bounds for one exec are larger; this keeps a request small.
const ARGS_MAX: usize = 4096;
const ARGS_BYTES_MAX: usize = 1024 * 1024;
const CWD_BYTES_MAX: usize = 4096;
const USER_BYTES_MAX: usize = 64;

/// What to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// A program and its arguments, as they are.
    Argv(Vec<Vec<u8>>),
    /// Code for a language's interpreter.
    Code {
        /// Which interpreter.
        language: Language,
        /// The code, as bytes.
        code: Vec<u8>,
    },
}

/// A checked command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// What to execute.
    pub program: Program,
    /// On top of the session's environment.
    pub env: Env,
    /// Absolute; none is the workspace.
    pub cwd: Option<String>,
    /// A user name or number inside; none is root.
    pub user: Option<String>,
    /// None is no limit.
    pub timeout: Option<Duration>,
    /// Bytes of each stream that are delivered; none is all, at the reader's pace.
    pub output_bytes_max: Option<u64>,
    /// Whether standard input follows.
    pub stdin: bool,
}

/// In one word, how a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// It ended by itself, whatever its exit code.
    Completed,
    /// Its time was up and everything it had started was killed.
    TimedOut,
    /// It was killed because the sandbox's memory was used up.
    OomKilled,
}

/// How a run ended, in full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// 128+n when a signal ended it.
    pub exit_code: i32,
    /// 0 when it exited by itself.
    pub signal: i32,
    /// In one word.
    pub status: RunStatus,
    /// From start to end, as the guest measured.
    pub duration: Duration,
    /// Bytes it wrote, delivered or not.
    pub stdout_bytes: u64,
    /// Bytes it wrote, delivered or not.
    pub stderr_bytes: u64,
    /// Whether some were not delivered.
    pub stdout_truncated: bool,
    /// Whether some were not delivered.
    pub stderr_truncated: bool,
    /// Limits that were hit while it ran.
    pub limits_hit: Vec<LimitKind>,
    /// What its sandbox tried to reach meanwhile and was denied by a rule.
    pub egress_denied: Vec<Flow>,
}

// === impl Command ===

impl Command {
    /// A command with nothing but its program; the rest is set by the caller.
    pub fn new(program: Program) -> Result<Self, Error> {
        check_program(&program)?;
        Ok(Self {
            program,
            env: Env::default(),
            cwd: None,
            user: None,
            timeout: Some(RUN_TIMEOUT_DEFAULT),
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
    /// As it is written in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::TimedOut => "timed_out",
            Self::OomKilled => "oom_killed",
        }
    }
}

fn check_program(program: &Program) -> Result<(), Error> {
    match program {
        Program::Code { code, .. } if code.iter().all(u8::is_ascii_whitespace) => Err(
            Error::invalid("no code to run: pass it as an argument or on standard input"),
        ),
        Program::Code { code, .. } if code.len() > CODE_BYTES_MAX => Err(Error::invalid(format!(
            "code is {} bytes, at most {CODE_BYTES_MAX} are allowed: write it to a file with `k8e sandbox write` and run that",
            code.len()
        ))),
        Program::Code { .. } => Ok(()),
        Program::Argv(args) => {
            let total: usize = args.iter().map(Vec::len).sum();
            if args.first().is_none_or(Vec::is_empty) {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(code: &[u8]) -> Result<Command, Error> {
        Command::new(Program::Code {
            language: Language::Bash,
            code: code.to_vec(),
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
        assert!(Command::new(Program::Argv(vec![vec![]])).is_err());
        assert!(Command::new(Program::Argv(vec![b"a\0b".to_vec()])).is_err());
        assert!(Command::new(Program::Argv(vec![b"a".to_vec(); ARGS_MAX + 1])).is_err());
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
