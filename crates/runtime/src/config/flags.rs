//! The flags of the command line, in the spelling of Go's `flag` package: one dash or two, `-flag value` or
//! `-flag=value`. One table has all of them: name, help and setter.

use super::{CHUNK_BYTES, Config, ConfigError, PROCESSES_MAX};
use k8e_net::go_duration;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Longest time of a flag: a longer timeout is as good as none.
const TIME_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Column of `-help` at which the description of a flag begins.
const HELP_COLUMN: usize = 32;

const INTRODUCTION: &str = "\
The runtime inside a sandbox pod: the server that agent-sandbox clients connect to.

It serves the legacy runtime API (HTTP, port 8888) and the APIs of sandboxd (HTTP, port 8080;
gRPC process.v1.ProcessService, port 9090). It runs commands, and as PID 1 it reaps orphaned
processes. An image needs this program and a shell:

  COPY k8e-runtime /usr/local/bin/
  ENTRYPOINT [\"/usr/local/bin/k8e-runtime\"]

Flags (-flag=value; one dash or two):
";

const ENVIRONMENT: &str = "  -version, -help

Environment:
  SANDBOX_BASE_DIR              same as -legacy-root-dir
  SANDBOX_EXEC_TIMEOUT_SECONDS  same as -exec-timeout, in seconds
  SANDBOXD_ALLOWED_HOSTS        same as -allowed-hosts; the names of both are allowed
  SANDBOXD_AUTH_TOKEN           when set, every request except health checks must send it
                                (authorization: Bearer <token>); commands do not inherit it
";

/// One flag.
struct Flag {
    name: &'static str,
    /// Its default, or a placeholder for its value.
    value: &'static str,
    /// Lines of its description in `-help`.
    help: &'static [&'static str],
    /// Parses a value into the configuration. The error says which values are valid.
    set: fn(&mut Config, &str) -> Result<(), &'static str>,
}

const FLAGS: &[Flag] = &[
    Flag {
        name: "listen-host",
        value: "0.0.0.0",
        help: &["IP address to listen on; :: is IPv6, and IPv4 too where the kernel is dual-stack"],
        set: |config, value| {
            // Names are not resolved: a static binary has no resolver to rely on.
            let address = if value == "localhost" {
                "127.0.0.1"
            } else {
                value
            };
            let parsed = address.parse();
            config.listen_host =
                parsed.map_err(|_| "an address, such as 0.0.0.0, :: or 127.0.0.1")?;
            Ok(())
        },
    },
    Flag {
        name: "legacy-port",
        value: "8888",
        help: &["TCP port of the legacy API; off disables it, 0 is any free port"],
        set: |config, value| {
            config.legacy_port = port(value)?;
            Ok(())
        },
    },
    Flag {
        name: "rest-port",
        value: "8080",
        help: &["TCP port of sandboxd's HTTP API (files, health, metadata); off, 0: see above"],
        set: |config, value| {
            config.rest_port = port(value)?;
            Ok(())
        },
    },
    Flag {
        name: "grpc-port",
        value: "9090",
        help: &["TCP port of sandboxd's gRPC API (processes); off, 0: see above"],
        set: |config, value| {
            config.grpc_port = port(value)?;
            Ok(())
        },
    },
    Flag {
        name: "root-dir",
        value: "/workspace",
        help: &["root of sandboxd's files and working directories; created if missing"],
        set: |config, value| {
            config.root_dir = dir(value)?;
            Ok(())
        },
    },
    Flag {
        name: "legacy-root-dir",
        value: "DIR",
        help: &["same for the legacy API (default: $SANDBOX_BASE_DIR, else /app)"],
        set: |config, value| {
            config.legacy_root_dir = dir(value)?;
            Ok(())
        },
    },
    Flag {
        name: "metadata-env-prefix",
        value: "SANDBOX_",
        help: &[
            "prefix of the environment variables that /v1/metadata shows, except",
            "those whose names look like secrets",
        ],
        set: |config, value| {
            if value.is_empty() {
                return Err("a prefix: an empty one would show every variable");
            }
            value.clone_into(&mut config.metadata_env_prefix);
            Ok(())
        },
    },
    Flag {
        name: "shutdown-timeout",
        value: "10s",
        help: &["grace period of running commands after SIGTERM"],
        set: |config, value| {
            config.shutdown_timeout = time(value)?;
            Ok(())
        },
    },
    Flag {
        name: "http-idle-timeout",
        value: "60s",
        help: &["closes a connection that is idle, between requests or within one, for this long"],
        set: |config, value| match time(value)? {
            Duration::ZERO => Err("a time above 0"),
            time => {
                config.http_idle_timeout = time;
                Ok(())
            }
        },
    },
    Flag {
        name: "stream-chunk-size",
        value: "4096",
        help: &["largest output event of a gRPC stream, in bytes (64 to 1048576)"],
        set: |config, value| match value.parse() {
            Ok(size) if CHUNK_BYTES.contains(&size) => {
                config.stream_chunk_size = size;
                Ok(())
            }
            Ok(_) | Err(_) => Err("64 to 1048576 bytes"),
        },
    },
    Flag {
        name: "exec-timeout",
        value: "300s",
        help: &["default timeout of a legacy command (when the request sets none); 0 is no limit"],
        set: |config, value| {
            config.exec_timeout = Some(time(value)?).filter(|time| !time.is_zero());
            Ok(())
        },
    },
    Flag {
        name: "max-output-bytes",
        value: "4194304",
        help: &["largest stdout, and largest stderr, in a legacy response; the rest is cut off"],
        set: |config, value| {
            config.max_output_bytes = number(value)?;
            Ok(())
        },
    },
    Flag {
        name: "max-upload-bytes",
        value: "8589934592",
        help: &["largest file that can be uploaded, in bytes"],
        set: |config, value| {
            config.max_upload_bytes = number(value)?;
            Ok(())
        },
    },
    Flag {
        name: "max-processes",
        value: "128",
        help: &["commands that may run at the same time (at most 10000)"],
        set: |config, value| {
            config.max_processes = usize::try_from(number(value)?)
                .ok()
                .filter(|number| *number <= PROCESSES_MAX)
                .ok_or("at most 10000")?;
            Ok(())
        },
    },
    Flag {
        name: "allowed-hosts",
        value: "NAME,*.NAME",
        help: &[
            "names that the Host header of an HTTP request may have, besides",
            "localhost, IP addresses and names of the cluster; * allows any.",
            "Other names get 403 unless a token is set: the request may come",
            "from a web page whose name resolves to this pod (DNS rebinding)",
        ],
        set: |config, value| config.allowed_hosts.add(value),
    },
];

/// Applies the flags of a command line. Returns the text to print instead of serving, for `-help` and `-version`.
pub(super) fn apply(
    config: &mut Config,
    args: impl IntoIterator<Item = OsString>,
) -> Result<Option<String>, ConfigError> {
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let text = arg.to_string_lossy().into_owned();
        let unknown = || ConfigError::Unknown(text.clone());
        let flag = text
            .strip_prefix("--")
            .or_else(|| text.strip_prefix('-'))
            .ok_or_else(unknown)?;
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (flag, None),
        };
        if matches!(name, "help" | "h") {
            return Ok(Some(help()));
        }
        if name == "version" {
            let version = env!("CARGO_PKG_VERSION");
            return Ok(Some(format!("k8e-runtime {version}\n")));
        }
        let Flag { name, set, .. } = FLAGS
            .iter()
            .find(|flag| flag.name == name)
            .ok_or_else(unknown)?;
        let value = value
            .or_else(|| Some(args.next()?.to_string_lossy().into_owned()))
            .ok_or(ConfigError::NoValue(name))?;
        set(config, &value).map_err(|why| ConfigError::Value {
            flag: name,
            value: value.clone(),
            why,
        })?;
    }
    Ok(None)
}

fn help() -> String {
    let mut text = INTRODUCTION.to_owned();
    for flag in FLAGS {
        let mut head = format!("  -{}={} ", flag.name, flag.value);
        for line in flag.help {
            text.push_str(&format!("{head:HELP_COLUMN$}{line}\n"));
            head.clear();
        }
    }
    text + ENVIRONMENT
}

fn port(value: &str) -> Result<Option<u16>, &'static str> {
    match value {
        "off" => Ok(None),
        _ => value.parse().map(Some).map_err(|_| "a port, or off"),
    }
}

fn time(value: &str) -> Result<Duration, &'static str> {
    go_duration::parse(value)
        .filter(|time| *time <= TIME_MAX)
        .ok_or("a time, such as 10s or 1m30s")
}

fn number(value: &str) -> Result<u64, &'static str> {
    match value.parse::<u64>() {
        Ok(number) if number > 0 => Ok(number),
        Ok(_) | Err(_) => Err("a number above 0"),
    }
}

fn dir(value: &str) -> Result<PathBuf, &'static str> {
    match PathBuf::from(value) {
        dir if dir.is_absolute() => Ok(dir),
        _ => Err("an absolute path"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_bounded() {
        assert_eq!(time("1m30s"), Ok(Duration::from_secs(90)));
        for bad in ["", "10", "-1s", "100h"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn help_has_every_flag_within_120_columns() {
        let help = help();
        for flag in FLAGS {
            assert!(
                help.contains(&format!("\n  -{}=", flag.name)),
                "{}",
                flag.name
            );
        }
        for line in help.lines() {
            assert!(line.len() <= 120, "{line}");
        }
    }
}
