//! Where the programs of a cluster come from: `K8E_KUBE_BIN`, else a cache, else the official
//! release, else built from the Go module proxy.
//!
//! What is needed depends on what is started, and nothing else is fetched or built. Versions are
//! those of the `go.mod` files in `deploy/dev/kube`, whichever way a program comes.

mod go;
mod release;

use crate::{Error, error, say};
use ring::digest::{Context, SHA256};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Names a directory that has all the programs; nothing else is tried then.
const OVERRIDE: &str = "K8E_KUBE_BIN";

/// Where the pinned modules are.
const MODULES_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/dev/kube");

/// Part of the cache's key: a change of how we build counts like a change of what.
const BUILD: &str = "1";

/// What somebody wants to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// etcd, the control plane, kubectl and KWOK.
    ControlPlane,
    /// What a real node adds: kubelet, containerd and its shims.
    Node,
    /// `helm`, for tests of the chart.
    Helm,
}

/// One program and where it is made.
#[derive(Debug)]
struct Program {
    name: &'static str,
    /// The folder of its `go.mod`.
    module: &'static str,
    /// Its Go package.
    package: &'static str,
}

const CONTROL_PLANE: &[Program] = &[
    Program::new("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Program::new(
        "kube-apiserver",
        "kubernetes",
        "k8s.io/kubernetes/cmd/kube-apiserver",
    ),
    Program::new(
        "kube-controller-manager",
        "kubernetes",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
    ),
    Program::new(
        "kube-scheduler",
        "kubernetes",
        "k8s.io/kubernetes/cmd/kube-scheduler",
    ),
    Program::new("kubectl", "kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    Program::new("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
];

const NODE: &[Program] = &[
    Program::new("kubelet", "kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    Program::new(
        "containerd",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd",
    ),
    Program::new(
        "containerd-shim-runc-v2",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    ),
    Program::new(
        "ctr",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/ctr",
    ),
    Program::new(
        "containerd-shim-runsc-v1",
        "gvisor",
        "k8e.dev/deploy/kube/gvisor",
    ),
];

const HELM: &[Program] = &[Program::new("helm", "helm", "helm.sh/helm/v3/cmd/helm")];

/// The directory that has every program of `needs`, which may have taken a quarter of an hour to
/// build the first time.
///
/// # Errors
/// When a program is missing from `K8E_KUBE_BIN`, or could be neither downloaded nor built.
pub fn directory(needs: &[Need]) -> Result<PathBuf, Error> {
    let programs: Vec<&Program> = needs.iter().flat_map(|need| need.programs()).collect();
    if let Some(dir) = std::env::var_os(OVERRIDE).filter(|dir| !dir.is_empty()) {
        let dir = PathBuf::from(dir);
        return match missing(&dir, &programs).first() {
            None => Ok(dir),
            Some(program) => Err(Error::NoBinary {
                program: program.name.to_owned(),
                reason: format!("{} of {OVERRIDE} does not have it", dir.display()),
            }),
        };
    }
    let dir = cache_dir()?;
    if missing(&dir, &programs).is_empty() {
        return Ok(dir);
    }
    fs::create_dir_all(&dir).map_err(error::file("make", &dir))?;
    let _lock = lock(&dir)?;
    // Somebody else may have made them while we waited.
    let missing = missing(&dir, &programs);
    fill(&dir, &missing)?;
    Ok(dir)
}

/// Gets each program into `dir`, complete or not at all.
fn fill(dir: &Path, programs: &[&Program]) -> Result<(), Error> {
    let scratch = tempfile::Builder::new()
        .prefix(".making-")
        .tempdir_in(dir)
        .map_err(error::file("make a directory in", dir))?;
    let kubernetes = version("kubernetes")?;
    let mut releases = release::Releases::default();
    for program in programs {
        let name = program.name;
        let made = scratch.path().join(name);
        let version = version(program.module)?;
        if let Err(reason) = releases.download(program, &version, &made, scratch.path()) {
            say(&format!("{name} {version}: no release ({reason})"));
            say(&format!("{name} {version}: building it with Go"));
            let dir = module_dir(program.module);
            go::build(program, &version, &kubernetes, &dir, &made)?;
        }
        let place = dir.join(name);
        fs::rename(&made, &place).map_err(error::file("move to", place))?;
    }
    Ok(())
}

fn missing<'a>(dir: &Path, programs: &[&'a Program]) -> Vec<&'a Program> {
    let is_missing = |program: &&&Program| !dir.join(program.name).is_file();
    programs.iter().filter(is_missing).copied().collect()
}

/// One process fills the cache, others wait for it.
fn lock(dir: &Path) -> Result<File, Error> {
    let path = dir.join(".lock");
    let file = File::create(&path).map_err(error::file("make", &path))?;
    if file.try_lock().is_err() {
        say(&format!(
            "waiting for another process that fills {}",
            dir.display()
        ));
        file.lock().map_err(error::file("lock", &path))?;
    }
    Ok(file)
}

/// The cache for exactly these versions.
fn cache_dir() -> Result<PathBuf, Error> {
    let mut modules: Vec<&str> = [CONTROL_PLANE, NODE, HELM]
        .iter()
        .flat_map(|programs| programs.iter())
        .map(|program| program.module)
        .collect();
    modules.sort_unstable();
    modules.dedup();
    let mut context = Context::new(&SHA256);
    context.update(BUILD.as_bytes());
    for module in modules {
        for path in files_of(&module_dir(module))? {
            context.update(&fs::read(&path).map_err(error::file("read", &path))?);
        }
    }
    let digest = hex(context.finish().as_ref());
    let kubernetes = version("kubernetes")?;
    Ok(user_cache_dir()?
        .join("kube")
        .join(format!("{kubernetes}-{}", &digest[..12])))
}

/// What decides how a module's programs turn out: its pins, and code of ours if it has any.
fn files_of(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(error::file("read", dir))?;
    let kinds = ["mod", "sum", "go"];
    let counts = |path: &PathBuf| {
        path.extension()
            .is_some_and(|e| kinds.iter().any(|k| e == *k))
    };
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(counts)
        .collect();
    files.sort();
    Ok(files)
}

/// Where this person's caches of k8e are.
pub(crate) fn user_cache_dir() -> Result<PathBuf, Error> {
    let given = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let caches = given("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(given("HOME")?).join(".cache")));
    let caches = caches.ok_or_else(|| Error::NoBinary {
        program: "cache".to_owned(),
        reason: "neither XDG_CACHE_HOME nor HOME is set".to_owned(),
    })?;
    Ok(caches.join("k8e"))
}

fn module_dir(module: &str) -> PathBuf {
    Path::new(MODULES_DIR).join(module)
}

/// The version of what a module is there for.
fn version(module: &str) -> Result<String, Error> {
    let path = module_dir(module).join("go.mod");
    let text = fs::read_to_string(&path).map_err(error::file("read", &path))?;
    required(&text).ok_or_else(|| Error::NoBinary {
        program: module.to_owned(),
        reason: format!("{} names no version", path.display()),
    })
}

/// The version in a `go.mod` of the module that its first tool is in.
fn required(go_mod: &str) -> Option<String> {
    let (_, tools) = go_mod.split_once("\ntool ")?;
    let tool = tools.trim_start_matches(['(', '\n', '\t', ' ']);
    go_mod.lines().find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split(' ');
        let (module, version) = (words.next()?, words.next()?);
        let is_it = version.starts_with('v') && tool.starts_with(module);
        is_it.then(|| version.to_owned())
    })
}

/// Bytes as people write checksums.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// === impl Need ===

impl Need {
    fn programs(self) -> &'static [Program] {
        match self {
            Self::ControlPlane => CONTROL_PLANE,
            Self::Node => NODE,
            Self::Helm => HELM,
        }
    }
}

// === impl Program ===

impl Program {
    const fn new(name: &'static str, module: &'static str, package: &'static str) -> Self {
        Self {
            name,
            module,
            package,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_has_a_pinned_module_that_names_its_package() {
        for program in [CONTROL_PLANE, NODE, HELM]
            .iter()
            .flat_map(|set| set.iter())
        {
            let path = module_dir(program.module).join("go.mod");
            let text = fs::read_to_string(&path).unwrap();
            assert!(
                text.contains(program.package),
                "{} is no tool of {}",
                program.package,
                path.display()
            );
            assert!(version(program.module).unwrap().starts_with('v'));
        }
    }

    #[test]
    fn the_version_is_that_of_the_module_a_tool_is_in() {
        let one = "module x\n\ntool a.b/c/cmd/d\n\nrequire a.b/c v1.2.3\n";
        assert_eq!(required(one).as_deref(), Some("v1.2.3"));
        let many = "go 1\ntool (\n\ta.b/c/cmd/d\n\ta.b/c/cmd/e\n)\n\nrequire (\n\tq.r v0.1.0 // indirect\n\ta.b/c v2.0.0\n)\n";
        assert_eq!(required(many).as_deref(), Some("v2.0.0"));
        assert_eq!(required("module x\n"), None);
    }
}
