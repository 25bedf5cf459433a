//! A prepared command: everything that must be allocated before `clone`, since its process cannot allocate.

use super::script::{self, ScriptFile};
use crate::error::{Error, show};
use crate::users::User;
use bytes::Bytes;
use k8e_wire::proto::{Exec, exec::Program};
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Default PATH when the request sets none, after [`OWN_PROGRAMS`] of the
/// user. The first entry is where a template puts replacements of the system's programs.
const PATH: &[u8] = b"/etc/k8e/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Below the home directory: where `pip install` puts programs of an unprivileged user.
const OWN_PROGRAMS: &[u8] = b"/.local/bin:";

/// Default working directory.
const CWD: &[u8] = b"/workspace";

/// Entries of PATH that are tried; each costs a system call.
const PATH_DIRS_MAX: usize = 256;

/// A command, ready for `execve`.
#[derive(Debug)]
pub(crate) struct Command {
    /// Candidate paths of the program, tried in order.
    pub(crate) programs: Vec<CString>,
    /// argv; the first is the program name of the request.
    pub(crate) argv: Vec<CString>,
    /// Environment.
    pub(crate) envp: Vec<CString>,
    /// Working directory; it exists.
    pub(crate) cwd: CString,
    /// User to run as.
    pub(crate) user: User,
}

// === impl Command ===

impl Command {
    /// Checks and prepares a request: looks up the user, makes the working directory, writes the
    /// script file, which is removed on drop.
    pub(crate) async fn prepare(request: &Exec) -> Result<(Self, Option<ScriptFile>), Error> {
        let user = User::find(&request.user)?;
        let env = environment(request, &user)?;
        let cwd = if request.cwd.is_empty() {
            CWD
        } else {
            &request.cwd
        };
        if cwd[0] != b'/' {
            return Err(Error::Invalid(format!(
                "working directory {:?} is not absolute",
                show(cwd)
            )));
        }
        let cwd_string = c_string("working directory", cwd)?;
        make_dirs(Path::new(OsStr::from_bytes(cwd)), &user)?;

        let (args, script) = match &request.program {
            Some(Program::Argv(argv)) => (argv.args.clone(), None),
            Some(Program::Script(script)) => {
                let dir = if script.in_cwd {
                    cwd
                } else {
                    script::FALLBACK_DIR
                };
                let file = ScriptFile::write(dir, &script.extension, &script.code, &user).await?;
                let mut args = script.interpreter.clone();
                if !args.is_empty() {
                    args.push(Bytes::copy_from_slice(file.path()));
                }
                (args, Some(file))
            }
            None => (Vec::new(), None),
        };
        let name = match args.first() {
            Some(name) if !name.is_empty() => name,
            _ => return Err(Error::Invalid("no program to run".to_owned())),
        };
        let programs = candidates(name, env.get(&b"PATH"[..]).map_or(PATH, Vec::as_slice))?;
        let argv = args
            .iter()
            .map(|arg| c_string("argument", arg))
            .collect::<Result<_, _>>()?;
        let envp = env
            .iter()
            .map(|(name, value)| c_string("environment", &[name, &b"="[..], value].concat()))
            .collect::<Result<_, _>>()?;
        let command = Self {
            programs,
            argv,
            envp,
            cwd: cwd_string,
            user,
        };
        Ok((command, script))
    }

    /// The program name of the request.
    pub(crate) fn name(&self) -> &[u8] {
        self.argv.first().map_or(b"", |name| name.as_bytes())
    }
}

fn environment(request: &Exec, user: &User) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, Error> {
    // A colon in it would make two PATH entries.
    let path = match user.home.contains(&b':') {
        true => PATH.to_vec(),
        false => [&user.home, OWN_PROGRAMS, PATH].concat(),
    };
    let base: [(&[u8], &[u8]); 4] = [
        (b"PATH", &path),
        (b"HOME", &user.home),
        (b"USER", &user.name),
        (b"LANG", b"C.UTF-8"),
    ];
    let mut env: BTreeMap<Vec<u8>, Vec<u8>> = base
        .into_iter()
        .map(|(name, value)| (name.to_vec(), value.to_vec()))
        .collect();
    for variable in &request.env {
        if variable.name.is_empty() || variable.name.contains(&b'=') {
            return Err(Error::Invalid(format!(
                "environment variable with name {:?}",
                show(&variable.name)
            )));
        }
        env.insert(variable.name.to_vec(), variable.value.to_vec());
    }
    Ok(env)
}

/// A name with a slash is a path; any other is searched in PATH, where an empty entry is the
/// working directory.
fn candidates(name: &[u8], path: &[u8]) -> Result<Vec<CString>, Error> {
    if name.contains(&b'/') {
        return Ok(vec![c_string("program", name)?]);
    }
    let dirs = path.split(|byte| *byte == b':').take(PATH_DIRS_MAX);
    dirs.map(|dir| {
        let dir = if dir.is_empty() { b"." } else { dir };
        c_string("program", &[dir, b"/", name].concat())
    })
    .collect()
}

/// Makes the directory and its parents; new ones belong to the user.
fn make_dirs(path: &Path, user: &User) -> Result<(), Error> {
    let shown = path.as_os_str().as_bytes();
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => return Err(Error::NotDirectory(show(shown))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::os("enter", shown)(error)),
    }
    let missing: Vec<&Path> = path.ancestors().take_while(|dir| !dir.exists()).collect();
    for dir in missing.into_iter().rev() {
        match std::fs::create_dir(dir) {
            Ok(()) if user.uid != 0 => {
                std::os::unix::fs::lchown(dir, Some(user.uid), Some(user.gid))
                    .map_err(Error::os("chown", shown))?;
            }
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::os("make directory", shown)(error)),
        }
    }
    Ok(())
}

fn c_string(what: &str, bytes: &[u8]) -> Result<CString, Error> {
    CString::new(bytes)
        .map_err(|_| Error::Invalid(format!("{what} {:?} contains NUL", show(bytes))))
}
