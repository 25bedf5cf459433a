//! Images without a registry: a directory becomes a docker-archive, which containerd imports.

use crate::service::{clean_command, output};
use crate::{Error, error};
use ring::digest::{SHA256, digest};
use std::fs;
use std::path::{Path, PathBuf};

/// Where a distribution's programs are.
const PROGRAM_DIRS: &[&str] = &[
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// The first process of every pod.
const PAUSE: &str = include_str!("pause.c");

/// An image to be: a directory, and how a container of it is started. Pods that use it say
/// `imagePullPolicy: Never`.
#[derive(Debug, Clone)]
pub struct Image {
    name: String,
    rootfs: PathBuf,
    command: Vec<String>,
    env: Vec<String>,
    user: String,
    working_dir: String,
}

/// A program where the system has it.
pub(crate) fn system_program(name: &str) -> Option<PathBuf> {
    let mut paths = PROGRAM_DIRS.iter().map(|dir| Path::new(dir).join(name));
    paths.find(|path| path.is_file())
}

/// Compiles the program that holds a pod's namespaces into the directory `rootfs`.
pub(crate) fn build_pause(rootfs: &Path) -> Result<(), Error> {
    fs::create_dir_all(rootfs).map_err(error::file("make", rootfs))?;
    let source = rootfs.with_extension("c");
    fs::write(&source, PAUSE).map_err(error::file("write", &source))?;
    let mut command = clean_command(Path::new("cc"), Path::new("/usr/bin"), rootfs);
    command.args(["-static", "-Os", "-s", "-o"]);
    output(command.arg(rootfs.join("pause")).arg(source)).map(drop)
}

// === impl Image ===

impl Image {
    /// An image of the files in `rootfs`, which become root's. `name` is with a host and a tag, like
    /// `k8e.test/guest:1`: a short one would be meant for Docker's registry.
    #[must_use]
    pub fn from_rootfs(name: &str, rootfs: &Path) -> Self {
        Self {
            name: name.to_owned(),
            rootfs: rootfs.to_owned(),
            command: Vec::new(),
            env: vec!["PATH=/usr/local/bin:/usr/bin:/bin".to_owned()],
            user: String::new(),
            working_dir: "/".to_owned(),
        }
    }

    /// What a container runs when its pod does not say.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// A variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Who it runs as: `uid` or `uid:gid`; root without.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        user.clone_into(&mut self.user);
        self
    }

    /// Where it starts.
    #[must_use]
    pub fn working_dir(mut self, dir: &str) -> Self {
        dir.clone_into(&mut self.working_dir);
        self
    }

    /// Copies programs of this machine into `rootfs`, with the libraries they load, to the same
    /// paths below `/bin` and `/lib`.
    ///
    /// # Errors
    /// When a program is not installed, or `ldd` cannot tell what it needs.
    pub fn copy_programs(rootfs: &Path, names: &[&str]) -> Result<(), Error> {
        for name in names {
            let program = system_program(name).ok_or_else(|| Error::NoBinary {
                program: (*name).to_owned(),
                reason: "it is not installed on this machine".to_owned(),
            })?;
            Self::copy_program(rootfs, &program, name)?;
        }
        Ok(())
    }

    /// Copies one program, from wherever it is, to `/bin/<name>` in `rootfs`, with the libraries it
    /// loads.
    ///
    /// # Errors
    /// When it cannot be read, or `ldd` cannot tell what it needs.
    pub fn copy_program(rootfs: &Path, program: &Path, name: &str) -> Result<(), Error> {
        copy(program, &rootfs.join("bin").join(name))?;
        for file in libraries_of(program)? {
            let inside = file.strip_prefix("/").unwrap_or(&file);
            copy(&file, &rootfs.join(inside))?;
        }
        for dir in ["tmp", "proc", "dev", "etc"] {
            let path = rootfs.join(dir);
            fs::create_dir_all(&path).map_err(error::file("make", &path))?;
        }
        Ok(())
    }

    /// Hands the image to containerd. `dir` has room for the archive.
    pub(crate) fn import(&self, bin: &Path, dir: &Path, socket: &Path) -> Result<(), Error> {
        let scratch = tempfile::Builder::new()
            .prefix("image-")
            .tempdir_in(dir)
            .map_err(error::file("make a directory in", dir))?;
        let archive = self.archive(scratch.path())?;
        let mut command = clean_command(&bin.join("ctr"), bin, dir);
        command.arg("--address").arg(socket);
        command.args(["--namespace", "k8s.io", "images", "import"]);
        output(command.arg(archive)).map(drop)
    }

    /// Makes the archive: one layer, what it is for, and which is which.
    fn archive(&self, scratch: &Path) -> Result<PathBuf, Error> {
        let layer = scratch.join("layer.tar");
        tar(&layer, &self.rootfs, &["."])?;
        let bytes = fs::read(&layer).map_err(error::file("read", &layer))?;
        let sum = crate::binaries::hex(digest(&SHA256, &bytes).as_ref());
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = serde_json::json!({
            "architecture": arch,
            "os": "linux",
            "config": {
                "Cmd": self.command,
                "Env": self.env,
                "User": self.user,
                "WorkingDir": self.working_dir,
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{sum}")] },
        });
        let manifest = serde_json::json!([{
            "Config": "config.json",
            "RepoTags": [self.name],
            "Layers": ["layer.tar"],
        }]);
        for (name, value) in [("config.json", config), ("manifest.json", manifest)] {
            let path = scratch.join(name);
            fs::write(&path, value.to_string()).map_err(error::file("write", &path))?;
        }
        let archive = scratch.join("image.tar");
        tar(
            &archive,
            scratch,
            &["manifest.json", "config.json", "layer.tar"],
        )?;
        Ok(archive)
    }
}

fn tar(archive: &Path, dir: &Path, names: &[&str]) -> Result<(), Error> {
    let mut command = clean_command(Path::new("tar"), Path::new("/usr/bin"), dir);
    command
        .args(["--create", "--numeric-owner", "--owner=0", "--group=0"])
        .arg("--file")
        .arg(archive)
        .arg("--directory")
        .arg(dir)
        .args(names);
    output(&mut command).map(drop)
}

/// What the loader loads for a program, itself included; nothing for a static one.
fn libraries_of(program: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut command = clean_command(Path::new("ldd"), Path::new("/usr/bin"), Path::new("/"));
    let listed = match output(command.arg(program)) {
        Ok(listed) => listed,
        Err(Error::Command { stderr, .. }) if stderr.contains("not a dynamic") => String::new(),
        Err(e) => return Err(e),
    };
    let paths = listed.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.find(|word| word.starts_with('/')).map(PathBuf::from)
    });
    Ok(paths.collect())
}

fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(error::file("make", parent))?;
    }
    fs::copy(from, to)
        .map(drop)
        .map_err(error::file("copy", from))
}
