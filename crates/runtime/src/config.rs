//! What an operator decides: flags in Go's spelling, as sandboxd has them, and a few variables.

mod duration;
mod flags;

use crate::host::AllowedHosts;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The token that clients must show. Never given to commands, never printed.
const TOKEN_VARIABLE: &str = "SANDBOXD_AUTH_TOKEN";

/// Where the legacy API has its files.
const BASE_DIR_VARIABLE: &str = "SANDBOX_BASE_DIR";

/// How long commands of the legacy API may take, in seconds.
const EXEC_TIMEOUT_VARIABLE: &str = "SANDBOX_EXEC_TIMEOUT_SECONDS";

/// Names in a Host header that are served besides those of the pod.
const ALLOWED_HOSTS_VARIABLE: &str = "SANDBOXD_ALLOWED_HOSTS";

/// Longest time for a command that anybody may ask for: a sandbox that is busy for longer has a
/// process of its own.
pub(crate) const EXEC_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Shortest token: a shorter one is guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Output of one stream of a legacy command that is kept: what an answer in JSON can reasonably hold.
const OUTPUT_BYTES: u64 = 4 * 1024 * 1024;

/// Largest file that is taken; what the disk of the pod takes is for Kubernetes to say.
const UPLOAD_BYTES: u64 = 8 * 1024 * 1024 * 1024;

/// Commands at once. Each has a supervisor, pipes and perhaps a few megabytes of output.
const PROCESSES: usize = 128;

/// Commands at once that can be asked for: each is at least two processes of the pod.
const PROCESSES_MAX: usize = 10_000;

/// Bytes of one event of a stream: below that is chatter, above is what a gRPC message may not have.
const CHUNK_BYTES: std::ops::RangeInclusive<usize> = 64..=1024 * 1024;

/// What the program was asked to do.
#[derive(Debug)]
pub enum Task {
    /// Serve.
    Serve(Box<Config>),
    /// Print this and go.
    Print(String),
}

/// How to serve. Shows nothing of itself: the environment has secrets.
pub struct Config {
    pub(crate) listen_host: IpAddr,
    /// None where that door is shut; 0 is any free port.
    pub(crate) legacy_port: Option<u16>,
    pub(crate) rest_port: Option<u16>,
    pub(crate) grpc_port: Option<u16>,
    pub(crate) root_dir: PathBuf,
    pub(crate) legacy_root_dir: PathBuf,
    pub(crate) metadata_env_prefix: String,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) http_idle_timeout: Duration,
    pub(crate) stream_chunk_size: usize,
    /// None is no limit.
    pub(crate) exec_timeout: Option<Duration>,
    pub(crate) max_output_bytes: u64,
    pub(crate) max_upload_bytes: u64,
    pub(crate) max_processes: usize,
    pub(crate) token: Option<Token>,
    pub(crate) allowed_hosts: AllowedHosts,
    /// What commands get.
    pub(crate) env: Vec<(OsString, OsString)>,
}

/// A secret. Shows nothing of itself.
#[derive(Clone)]
pub(crate) struct Token(String);

/// Why the command line or the environment makes no sense.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// An argument that is none of ours.
    #[error("{0}: no such flag; -help lists them")]
    Unknown(String),
    /// A flag without its value.
    #[error("-{0} needs a value: -{0}=…")]
    NoValue(&'static str),
    /// A value that cannot be.
    #[error("-{flag}={value}: {why}")]
    Value {
        /// Which flag.
        flag: &'static str,
        /// What it was given.
        value: String,
        /// What it takes.
        why: &'static str,
    },
    /// A variable that cannot be.
    #[error("{variable}: {why}")]
    Variable {
        /// Which variable.
        variable: &'static str,
        /// What it takes.
        why: &'static str,
    },
    /// Two doors with one port.
    #[error("-{0} and -{1} are the same port: give each its own, or turn one off with -{1}=off")]
    SamePort(&'static str, &'static str),
    /// Nothing to do.
    #[error("all doors are off: leave one of -legacy-port, -rest-port and -grpc-port on")]
    NoDoor,
}

// === impl Config ===

impl Config {
    /// Reads a command line (without the program's name) and an environment.
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
        let doors = [
            ("legacy-port", self.legacy_port),
            ("rest-port", self.rest_port),
            ("grpc-port", self.grpc_port),
        ];
        if doors.iter().all(|(_, port)| port.is_none()) {
            return Err(ConfigError::NoDoor);
        }
        for (index, (name, port)) in doors.iter().enumerate() {
            let same =
                |(_, other): &&(&str, Option<u16>)| port.is_some_and(|p| p != 0) && other == port;
            if let Some((other, _)) = doors[index + 1..].iter().find(same) {
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
    /// Takes the token out of an environment.
    fn take(env: &mut Vec<(OsString, OsString)>) -> Result<Option<Self>, ConfigError> {
        let Some(at) = env.iter().position(|(name, _)| name == TOKEN_VARIABLE) else {
            return Ok(None);
        };
        let (_, value) = env.swap_remove(at);
        let failed = ConfigError::Variable {
            variable: TOKEN_VARIABLE,
            why: "use at least 16 characters of ASCII without spaces",
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

    /// Whether this is it, in a time that does not tell how much of it is.
    pub(crate) fn is(&self, shown: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differ = own
            .iter()
            .zip(shown)
            .fold(0u8, |differ, (a, b)| std::hint::black_box(differ | (a ^ b)));
        own.len() == shown.len() && differ == 0
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
            why: "not an absolute path",
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
            why: "not a number of seconds (0 is no limit)",
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
    fn flags_are_as_in_go() {
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
    fn nonsense_is_told() {
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
                "all doors are off",
            ),
            (&["-help"], "-metadata-env-prefix"),
            (&["--version"], env!("CARGO_PKG_VERSION")),
        ] {
            let said = read(args, &[]).unwrap_err();
            assert!(said.contains(says), "{args:?}: {said}");
        }
    }

    #[test]
    fn variables_count_and_the_token_goes_no_further() {
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
