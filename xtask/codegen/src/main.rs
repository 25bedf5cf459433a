//! Generates the committed protobuf code with protox, so nobody needs protoc: `cargo xtask codegen`.
//! `--check` fails when what is committed is not what the protos say. Runs in the root of the repository.
#![expect(clippy::print_stderr, reason = "a build tool talks to its terminal")]

use prost::Message as _;
use std::path::Path;
use std::process::ExitCode;

/// What went wrong, for the person who ran it.
type Outcome = Result<(), String>;

/// Whether to write the generated files or only compare them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Write them.
    Write,
    /// Fail when they differ.
    Check,
}

struct Target {
    protos: &'static [&'static str],
    crate_dir: &'static str,
    file: &'static str,
    services: bool,
    /// Whether clients can connect by themselves, for which tonic's transport is needed.
    transport: bool,
}

const TARGETS: &[Target] = &[
    Target {
        protos: &["k8e/guest/v1/guest.proto"],
        crate_dir: "crates/wire/src/gen",
        file: "k8e.guest.v1.rs",
        services: false,
        transport: false,
    },
    Target {
        protos: &[
            "k8e/v1/sandboxes.proto",
            "k8e/v1/identity.proto",
            "k8e/v1/secrets.proto",
            "k8e/v1/approvals.proto",
            "k8e/v1/snapshots.proto",
            "k8e/v1/templates.proto",
        ],
        crate_dir: "crates/api/src/gen",
        file: "k8e.v1.rs",
        services: true,
        transport: true,
    },
    Target {
        protos: &["sandbox/v1/sandbox.proto"],
        crate_dir: "crates/api/src/gen",
        file: "sandbox.v1.rs",
        services: true,
        transport: true,
    },
    Target {
        protos: &["process/v1/process.proto"],
        crate_dir: "crates/runtime/src/gen",
        file: "process.v1.rs",
        services: true,
        transport: false,
    },
];

/// What these hold must not be printed by accident: their `Debug` is written by hand.
const SECRET_MESSAGES: &[&str] = &[
    ".k8e.v1.SetSecretRequest",
    ".k8e.v1.CreateKeyResponse",
    ".k8e.v1.ExposedService",
    ".k8e.v1.RegistryCredentials",
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(Mode::Write),
        ["--check"] => run(Mode::Check),
        _ => Err("usage: cargo xtask codegen [--check]".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(mode: Mode) -> Outcome {
    for target in TARGETS {
        let descriptors =
            protox::compile(target.protos, ["proto"]).map_err(|e| format!("{e:?}"))?;
        let out = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mut config = tonic_prost_build::Config::new();
        config
            .bytes(["."])
            .skip_debug(SECRET_MESSAGES)
            .out_dir(out.path());
        let encoded = descriptors.encode_to_vec();
        tonic_prost_build::configure()
            .build_client(target.services)
            .build_server(target.services)
            .build_transport(target.transport)
            .out_dir(out.path())
            .compile_fds_with_config(descriptors, config)
            .map_err(|e| format!("{}: {e}", target.protos.join(", ")))?;
        let code = std::fs::read(out.path().join(target.file)).map_err(|e| e.to_string())?;
        let dir = Path::new(target.crate_dir);
        ensure(&dir.join(target.file), &code, mode)?;
        if target.services {
            ensure(&dir.join(target.file).with_extension("bin"), &encoded, mode)?;
        }
    }
    Ok(())
}

fn ensure(path: &Path, want: &[u8], mode: Mode) -> Outcome {
    if std::fs::read(path).is_ok_and(|have| have == want) {
        return Ok(());
    }
    if mode == Mode::Check {
        return Err(format!(
            "{} is stale: run `cargo xtask codegen` and commit it",
            path.display()
        ));
    }
    let dir = path.parent().expect("generated files live in a directory");
    std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    std::fs::write(path, want).map_err(|e| format!("{}: {e}", path.display()))
}
