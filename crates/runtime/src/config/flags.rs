//! The command line, in the spelling of Go's `flag`: one dash or two, `-flag value` or `-flag=value`.

use super::{CHUNK_BYTES, Config, ConfigError, duration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const HELP: &str = "\
The runtime inside a sandbox pod: what clients of agent-sandbox talk to.

It serves the legacy runtime API (HTTP, port 8888) and that of sandboxd (HTTP, port 8080;
gRPC process.v1.ProcessService, port 9090), runs commands, and reaps as PID 1. An image needs
this program and a shell:

  COPY k8e-runtime /usr/local/bin/
  ENTRYPOINT [\"/usr/local/bin/k8e-runtime\"]

Flags (-flag=value; one dash or two):
  -listen-host=0.0.0.0          address to listen on; :: is IPv6, and IPv4 where the kernel has both
  -legacy-port=8888             port of the legacy API; off shuts the door, 0 is any free port
  -rest-port=8080               port of sandboxd's files and probes; likewise
  -grpc-port=9090               port of sandboxd's processes; likewise
  -root-dir=/workspace          root of sandboxd's files and working directories; made if missing
  -legacy-root-dir=DIR          the same for the legacy API (default $SANDBOX_BASE_DIR or /app)
  -metadata-env-prefix=SANDBOX_ variables that /v1/metadata shows, except those that look secret
  -shutdown-timeout=10s         how long commands have to end after SIGTERM
  -http-idle-timeout=60s        how long a connection may be silent between and inside requests
  -stream-chunk-size=4096       bytes of output in one event of a stream
  -exec-timeout=300s            limit of a legacy command that asks for none; 0 is no limit
  -max-output-bytes=4194304     bytes of each stream that a legacy answer holds
  -max-upload-bytes=8589934592  largest file that is taken
  -max-processes=128            commands at once
  -allowed-hosts=NAME,*.NAME    names in the Host header of HTTP requests that are served besides
                                localhost, addresses and names of the cluster; * is any. A request
                                for another name is refused unless there is a token: it may be of a
                                web page whose name leads here (DNS rebinding)
  -version, -help

Environment:
  SANDBOX_BASE_DIR              as -legacy-root-dir
  SANDBOX_EXEC_TIMEOUT_SECONDS  as -exec-timeout, in seconds
  SANDBOXD_ALLOWED_HOSTS        as -allowed-hosts; both count
  SANDBOXD_AUTH_TOKEN           when set, every request but health checks needs it
                                (authorization: Bearer …); commands do not get it
";

/// Changes what is asked for. Returns what to print instead of serving.
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
        match name {
            "help" | "h" => return Ok(Some(HELP.to_owned())),
            "version" => {
                let version = env!("CARGO_PKG_VERSION");
                return Ok(Some(format!("k8e-runtime {version}\n")));
            }
            _ => {}
        }
        let name = known(name).ok_or_else(unknown)?;
        let value = value
            .or_else(|| Some(args.next()?.to_string_lossy().into_owned()))
            .ok_or(ConfigError::NoValue(name))?;
        set(config, name, &value)?;
    }
    Ok(None)
}

const NAMES: &[&str] = &[
    "listen-host",
    "legacy-port",
    "rest-port",
    "grpc-port",
    "root-dir",
    "legacy-root-dir",
    "metadata-env-prefix",
    "shutdown-timeout",
    "http-idle-timeout",
    "stream-chunk-size",
    "exec-timeout",
    "max-output-bytes",
    "max-upload-bytes",
    "max-processes",
    "allowed-hosts",
];

fn known(name: &str) -> Option<&'static str> {
    NAMES.iter().copied().find(|known| *known == name)
}

fn set(config: &mut Config, flag: &'static str, value: &str) -> Result<(), ConfigError> {
    let bad = |why| ConfigError::Value {
        flag,
        value: value.to_owned(),
        why,
    };
    let port = || match value {
        "off" => Ok(None),
        _ => value.parse().map(Some).map_err(|_| bad("a port, or off")),
    };
    let time = || duration::parse(value).ok_or_else(|| bad("a time, such as 10s or 1m30s"));
    let number = || match value.parse::<u64>() {
        Ok(number) if number > 0 => Ok(number),
        Ok(_) | Err(_) => Err(bad("a number above 0")),
    };
    let dir = || match PathBuf::from(value) {
        dir if dir.is_absolute() => Ok(dir),
        _ => Err(bad("an absolute path")),
    };
    match flag {
        // Names are not looked up: a static program has no resolver to rely on.
        "listen-host" => {
            let address = if value == "localhost" {
                "127.0.0.1"
            } else {
                value
            };
            let failed = |_| bad("an address, such as 0.0.0.0, :: or 127.0.0.1");
            config.listen_host = address.parse().map_err(failed)?;
        }
        "legacy-port" => config.legacy_port = port()?,
        "rest-port" => config.rest_port = port()?,
        "grpc-port" => config.grpc_port = port()?,
        "root-dir" => config.root_dir = dir()?,
        "legacy-root-dir" => config.legacy_root_dir = dir()?,
        "metadata-env-prefix" if value.is_empty() => {
            return Err(bad("a prefix: without one every variable would be shown"));
        }
        "metadata-env-prefix" => value.clone_into(&mut config.metadata_env_prefix),
        "shutdown-timeout" => config.shutdown_timeout = time()?,
        "http-idle-timeout" => match time()? {
            Duration::ZERO => return Err(bad("a time above 0")),
            time => config.http_idle_timeout = time,
        },
        "stream-chunk-size" => match value.parse() {
            Ok(size) if CHUNK_BYTES.contains(&size) => config.stream_chunk_size = size,
            Ok(_) | Err(_) => return Err(bad("64 to 1048576 bytes")),
        },
        "exec-timeout" => config.exec_timeout = Some(time()?).filter(|time| !time.is_zero()),
        "max-output-bytes" => config.max_output_bytes = number()?,
        "max-upload-bytes" => config.max_upload_bytes = number()?,
        "allowed-hosts" => config.allowed_hosts.add(value).map_err(bad)?,
        _ => {
            config.max_processes = usize::try_from(number()?)
                .ok()
                .filter(|number| *number <= super::PROCESSES_MAX)
                .ok_or_else(|| bad("at most 10000"))?;
        }
    }
    Ok(())
}
