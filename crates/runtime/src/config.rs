//! Configuration: command-line flags, with the names and spelling of sandboxd's, and environment variables.

mod flags;

use crate::host::AllowedHosts;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Bearer token that clients must send. Commands do not inherit it, and it is never printed.
const TOKEN_VARIABLE: &str = "SANDBOXD_AUTH_TOKEN";

/// Root directory of the legacy API.
const BASE_DIR_VARIABLE: &str = "SANDBOX_BASE_DIR";

/// Default timeout of legacy commands, in seconds.
const EXEC_TIMEOUT_VARIABLE: &str = "SANDBOX_EXEC_TIMEOUT_SECONDS";

/// Names that are allowed in a Host header, besides those of the pod.
const ALLOWED_HOSTS_VARIABLE: &str = "SANDBOXD_ALLOWED_HOSTS";

/// Largest timeout that a request may set; a larger one is reduced to it. What runs for longer belongs into a process
/// of its own, not into a request.
pub(crate) const EXEC_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Shortest token. A shorter one could be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Default of `-max-output-bytes`: stdout, and stderr, of a legacy command, which are buffered and sent as JSON.
const OUTPUT_BYTES: u64 = 4 * 1024 * 1024;

/// Default of `-max-upload-bytes`. The disk usage of the pod is limited by Kubernetes.
const UPLOAD_BYTES: u64 = 8 * 1024 * 1024 * 1024;

/// Default of `-max-processes`. Each command has a supervisor, pipes and up to a few megabytes of buffered output.
const PROCESSES: usize = 128;

/// Largest `-max-processes`: each command is at least two processes of the pod.
const PROCESSES_MAX: usize = 10_000;

/// Valid `-stream-chunk-size`: smaller events are mostly overhead, larger ones exceed the message size of gRPC clients.
const CHUNK_BYTES: std::ops::RangeInclusive<usize> = 64..=1024 * 1024;

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve with this configuration.
    Serve(Box<Config>),
    /// Print this text (`-help`, `-version`) and exit.
    Print(String),
}

/// Configuration of the server. Its `Debug` shows no field: the environment may contain secrets.
pub struct Config {
    pub(crate) listen_host: IpAddr,
    /// `None`: this API is off. 0: any free port.
    pub(crate) legacy_port: Option<u16>,
    pub(crate) rest_port: Option<u16>,
    pub(crate) grpc_port: Option<u16>,
    pub(crate) root_dir: PathBuf,
    pub(crate) legacy_root_dir: PathBuf,
    pub(crate) metadata_env_prefix: String,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) http_idle_timeout: Duration,
    pub(crate) stream_chunk_size: usize,
    /// Default timeout of a legacy command. `None`: no limit.
    pub(crate) exec_timeout: Option<Duration>,
    pub(crate) max_output_bytes: u64,
    pub(crate) max_upload_bytes: u64,
    pub(crate) max_processes: usize,
    pub(crate) token: Option<Token>,
    pub(crate) allowed_hosts: AllowedHosts,
    /// Environment of the commands.
    pub(crate) env: Vec<(OsString, OsString)>,
}

/// The bearer token. Its `Debug` does not show it.
#[derive(Clone)]
pub(crate) struct Token(String);

/// A command line or an environment that is not valid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// An argument that is not a known flag.
    #[error("{0}: no such flag; -help lists all flags")]
    Unknown(String),
    /// A flag without a value.
    #[error("-{0} needs a value: -{0}=VALUE")]
    NoValue(&'static str),
    /// A flag with an invalid value.
    #[error("-{flag}={value}: not valid; use {why}")]
    Value {
        /// Name of the flag, without dashes.
        flag: &'static str,
        /// The value as given.
        value: String,
        /// The values that are valid, as in "a port, or off".
        why: &'static str,
    },
    /// An environment variable with an invalid value. The value may be secret and is not shown.
    #[error("{variable}: not valid; use {why}")]
    Variable {
        /// Name of the variable.
        variable: &'static str,
        /// The values that are valid.
        why: &'static str,
    },
    /// Two APIs on the same port; the names of their flags.
    #[error("-{0} and -{1} are the same port: give each its own, or turn one off with -{1}=off")]
    SamePort(&'static str, &'static str),
    /// Every API is off.
    #[error("all APIs are off: leave at least one of -legacy-port, -rest-port and -grpc-port on")]
    NoListener,
}

// === impl Config ===

impl Config {
    /// Parses a command line (without the program's name) and an environment. Flags override variables.
    pub fn read(
        args: impl IntoIterator<Item = OsString>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Task, ConfigError> {
        let mut env: Vec<(OsString, OsString)> = env.into_iter().collect();
        let token = Token::take(&mut env)?;
        let mut config = Self {
            listen_host: IpAddr::from([0, 0, 0, 0]),
            legacy_port: Some(8888),
            rest_port: Some(8080),
            grpc_port: Some(9090),
            root_dir: "/workspace".into(),
            legacy_root_dir: base_dir(&env)?,
            metadata_env_prefix: "SANDBOX_".to_owned(),
            shutdown_timeout: Duration::from_secs(10),
            http_idle_timeout: Duration::from_secs(60),
            stream_chunk_size: 4096,
            exec_timeout: exec_timeout(&env)?,
            max_output_bytes: OUTPUT_BYTES,
            max_upload_bytes: UPLOAD_BYTES,
            max_processes: PROCESSES,
            token,
            allowed_hosts: allowed_hosts(&env)?,
            env,
        };
        if let Some(text) = flags::apply(&mut config, args)? {
            return Ok(Task::Print(text));
        }
        config.check()?;
        Ok(Task::Serve(Box::new(config)))
    }

    fn check(&self) -> Result<(), ConfigError> {
        let listeners = [
            ("legacy-port", self.legacy_port),
            ("rest-port", self.rest_port),
            ("grpc-port", self.grpc_port),
        ];
        if listeners.iter().all(|(_, port)| port.is_none()) {
            return Err(ConfigError::NoListener);
        }
        for (index, (name, port)) in listeners.iter().enumerate() {
            let same =
                |(_, other): &&(&str, Option<u16>)| port.is_some_and(|p| p != 0) && other == port;
            if let Some((other, _)) = listeners[index + 1..].iter().find(same) {
                return Err(ConfigError::SamePort(name, other));
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").finish_non_exhaustive()
    }
}

// === impl Token ===

impl Token {
    /// Removes the token from an environment and returns it.
    fn take(env: &mut Vec<(OsString, OsString)>) -> Result<Option<Self>, ConfigError> {
        let Some(at) = env.iter().position(|(name, _)| name == TOKEN_VARIABLE) else {
            return Ok(None);
        };
        let (_, value) = env.swap_remove(at);
        let failed = ConfigError::Variable {
            variable: TOKEN_VARIABLE,
            why: "at least 16 printable ASCII characters without spaces",
        };
        match value.into_string() {
            Ok(token) if token.is_empty() => Ok(None),
            Ok(token)
                if token.len() >= TOKEN_CHARS_MIN
                    && token.bytes().all(|byte| byte.is_ascii_graphic()) =>
            {
                Ok(Some(Self(token)))
            }
            Ok(_) | Err(_) => Err(failed),
        }
    }

    /// Compares in constant time: the time does not depend on how many bytes are equal.
    pub(crate) fn is(&self, sent: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differ = own
            .iter()
            .zip(sent)
            .fold(0u8, |differ, (a, b)| std::hint::black_box(differ | (a ^ b)));
        own.len() == sent.len() && differ == 0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

fn base_dir(env: &[(OsString, OsString)]) -> Result<PathBuf, ConfigError> {
    match variable(env, BASE_DIR_VARIABLE) {
        None => Ok("/app".into()),
        Some(dir) if PathBuf::from(dir).is_absolute() => Ok(dir.into()),
        Some(_) => Err(ConfigError::Variable {
            variable: BASE_DIR_VARIABLE,
            why: "an absolute path",
        }),
    }
}

fn allowed_hosts(env: &[(OsString, OsString)]) -> Result<AllowedHosts, ConfigError> {
    let own = rustix::system::uname();
    let mut allowed = AllowedHosts::of_pod(&own.nodename().to_string_lossy());
    let more = variable(env, ALLOWED_HOSTS_VARIABLE).map(|more| more.to_string_lossy());
    let failed = |why| ConfigError::Variable {
        variable: ALLOWED_HOSTS_VARIABLE,
        why,
    };
    allowed.add(&more.unwrap_or_default()).map_err(failed)?;
    Ok(allowed)
}

fn exec_timeout(env: &[(OsString, OsString)]) -> Result<Option<Duration>, ConfigError> {
    let Some(value) = variable(env, EXEC_TIMEOUT_VARIABLE) else {
        return Ok(Some(Duration::from_secs(300)));
    };
    let seconds = value.to_str().and_then(|text| text.trim().parse().ok());
    seconds
        .and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok())
        .map(|limit| Some(limit.min(EXEC_TIMEOUT_MAX)).filter(|limit| !limit.is_zero()))
        .ok_or(ConfigError::Variable {
            variable: EXEC_TIMEOUT_VARIABLE,
            why: "a number of seconds; 0 is no limit",
        })
}

fn variable<'a>(env: &'a [(OsString, OsString)], name: &str) -> Option<&'a OsString> {
    env.iter()
        .find(|(known, value)| known == name && !value.is_empty())
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &[&str], env: &[(&str, &str)]) -> Result<Config, String> {
        let args = args.iter().map(OsString::from);
        let env = env.iter().map(|(name, value)| (name.into(), value.into()));
        match Config::read(args, env) {
            Ok(Task::Serve(config)) => Ok(*config),
            Ok(Task::Print(text)) => Err(text),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn flags_are_spelled_as_in_go() {
        let config = read(
            &[
                "-grpc-port",
                "1",
                "--rest-port=2",
                "-legacy-port=off",
                "--root-dir=/w",
                "-shutdown-timeout=1m1.5s",
                "--stream-chunk-size",
                "100",
            ],
            &[],
        )
        .unwrap();
        assert_eq!((config.grpc_port, config.rest_port), (Some(1), Some(2)));
        assert_eq!(config.legacy_port, None);
        assert_eq!(config.root_dir, PathBuf::from("/w"));
        assert_eq!(config.shutdown_timeout, Duration::from_millis(61_500));
        assert_eq!(config.stream_chunk_size, 100);
    }

    #[test]
    fn invalid_flags_are_refused_with_a_reason() {
        for (args, says) in [
            (&["-port=1"][..], "no such flag"),
            (&["serve"], "no such flag"),
            (&["-rest-port"], "needs a value"),
            (&["-rest-port=70000"], "a port"),
            (&["-rest-port=9090"], "the same port"),
            (&["-root-dir=w"], "absolute"),
            (&["-listen-host=example.com"], "an address"),
            (&["-http-idle-timeout=5"], "a time"),
            (&["-stream-chunk-size=1"], "64"),
            (&["-allowed-hosts=http://a"], "names without port"),
            (
                &["-rest-port=off", "-grpc-port=off", "-legacy-port=off"],
                "all APIs are off",
            ),
            (&["-help"], "-metadata-env-prefix"),
            (&["--version"], env!("CARGO_PKG_VERSION")),
        ] {
            let said = read(args, &[]).unwrap_err();
            assert!(said.contains(says), "{args:?}: {said}");
        }
    }

    #[test]
    fn environment_variables_apply_and_commands_do_not_inherit_the_token() {
        let config = read(
            &[],
            &[
                ("SANDBOX_BASE_DIR", "/base"),
                ("SANDBOX_EXEC_TIMEOUT_SECONDS", "1.5"),
                ("SANDBOXD_AUTH_TOKEN", "0123456789abcdef"),
                ("PATH", "/bin"),
            ],
        )
        .unwrap();
        assert_eq!(config.legacy_root_dir, PathBuf::from("/base"));
        assert_eq!(config.exec_timeout, Some(Duration::from_millis(1500)));
        assert!(config.env.iter().all(|(name, _)| name != TOKEN_VARIABLE));
        assert_eq!(config.env.len(), 3);
        let token = config.token.unwrap();
        assert!(token.is(b"0123456789abcdef"));
        assert!(!token.is(b"0123456789abcdee") && !token.is(b"0123") && !token.is(b""));
        assert_eq!(format!("{token:?}"), "Token");

        let none = read(&[], &[("SANDBOX_EXEC_TIMEOUT_SECONDS", "0")]).unwrap();
        assert_eq!(none.exec_timeout, None);
        for (name, value) in [
            ("SANDBOX_BASE_DIR", "base"),
            ("SANDBOX_EXEC_TIMEOUT_SECONDS", "soon"),
            ("SANDBOXD_AUTH_TOKEN", "short"),
            ("SANDBOXD_ALLOWED_HOSTS", "a:80"),
        ] {
            assert!(read(&[], &[(name, value)]).unwrap_err().contains(name));
        }
    }
}
