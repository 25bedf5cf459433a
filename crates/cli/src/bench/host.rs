//! Programs of the host, measured beside ours.
//!
//! Which of them work here is found out by trying each once. What they leave is removed when this
//! is dropped.

use super::bundle::Bundles;
use super::subject::Host;
use crate::failure::Failure;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The bundle whose program ends at once, and the one whose program stays.
const ONCE: &str = "once";
const STAYS: &str = "stays";

/// crun refuses machines with a controller in the cgroup2 beside v1's; without this mount it runs.
#[cfg(target_os = "linux")]
const UNIFIED: &str = "/sys/fs/cgroup/unified";

/// Where a sandbox looks for programs.
const SANDBOX_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What of an error message is told.
const SAID_CHARS_MAX: usize = 200;

/// The programs that work here.
pub(super) struct Programs {
    /// Removed with this.
    dir: TempDir,
    /// What container ids begin with, on this machine ours alone. Runtimes name a container's control
    /// group by its id, whatever their `--root`: with equal ids, a container that ends kills the one
    /// of another benchmark.
    id_prefix: String,
    bundles: Bundles,
    usable: Vec<Host>,
    /// Those that run without the mount that disturbs them.
    hidden_from: Vec<Host>,
    containers: AtomicU64,
}

// === impl Programs ===

impl Programs {
    /// Tries each; says which were left out, and why.
    pub(super) fn find(hosts: &[Host], notes: &mut Vec<String>) -> Result<Self, Failure> {
        let dir = tempfile::Builder::new()
            .prefix("k8e-bench-")
            .tempdir()
            .map_err(|e| Failure::io("make a temporary directory", &e))?;
        let name = dir.path().file_name().unwrap_or_default();
        let id_prefix = name.to_string_lossy().into_owned();
        let bundles = Bundles::make(
            dir.path(),
            &[(ONCE, &["/bin/true"]), (STAYS, &["/bin/sleep", "infinity"])],
        )?;
        let mut programs = Self {
            dir,
            id_prefix,
            bundles,
            usable: Vec::new(),
            hidden_from: Vec::new(),
            containers: AtomicU64::new(0),
        };
        let mut missing: Vec<&str> = Vec::new();
        for host in hosts.iter().copied() {
            match programs.try_out(host) {
                Ok(()) => programs.usable.push(host),
                Err(e) if e.kind() == io::ErrorKind::NotFound => missing.push(host.program()),
                Err(e) => notes.push(format!("{} does not work here: {e}", host.name())),
            }
        }
        missing.dedup();
        if !missing.is_empty() {
            notes.push(format!("not installed here: {}", missing.join(", ")));
        }
        Ok(programs)
    }

    pub(super) fn usable(&self) -> &[Host] {
        &self.usable
    }

    /// Runs one to its end; how long that took.
    pub(super) fn time(&self, host: Host) -> Result<Duration, Failure> {
        let timed = self.run(host, Stdio::null());
        timed.map_err(|e| Failure::io(&format!("measure {}", host.name()), &e))
    }

    /// Prepares this thread for many of [`Self::time_here`].
    pub(super) fn prepare_thread(&self, host: Host) -> io::Result<()> {
        match self.hidden_from.contains(&host) {
            true => hide_unified(),
            false => Ok(()),
        }
    }

    /// Like [`Self::time`], on a thread that is prepared.
    pub(super) fn time_here(&self, host: Host) -> io::Result<Duration> {
        time(&mut self.command(host))
    }

    fn try_out(&mut self, host: Host) -> io::Result<()> {
        if host == Host::RunscExec {
            self.attempt(|programs, said| {
                let mut run = programs.runsc();
                run.args(["run", "--detach", "--bundle"]);
                run.arg(programs.bundles.bundle(STAYS));
                time(run.arg(programs.id(STAYS)).stderr(said))
            })?;
        }
        let once = |programs: &Self, said| programs.run(host, said);
        let plain = self.attempt(once);
        if plain.is_ok() || !matches!(host, Host::Crun | Host::Runc) {
            return plain;
        }
        self.hidden_from.push(host);
        // The first error is the one that people see when they try it themselves.
        self.attempt(once).or(plain)
    }

    /// An error says what the program said last.
    fn attempt(&self, run: impl Fn(&Self, Stdio) -> io::Result<Duration>) -> io::Result<()> {
        let path = self.dir.path().join("said");
        match run(self, File::create(&path)?.into()) {
            Err(e) if e.kind() == io::ErrorKind::Other => {
                let said = fs::read_to_string(&path).unwrap_or_default();
                let last = said.lines().rfind(|line| !line.trim().is_empty());
                let last: String = last
                    .unwrap_or_default()
                    .chars()
                    .take(SAID_CHARS_MAX)
                    .collect();
                Err(io::Error::other(format!("{e}: {last}")))
            }
            done => done.map(drop),
        }
    }

    fn run(&self, host: Host, said: Stdio) -> io::Result<Duration> {
        let mut command = self.command(host);
        command.stderr(said);
        if !self.hidden_from.contains(&host) {
            return time(&mut command);
        }
        // Mounts are hidden from a thread and what it starts; ours are to stay as they are.
        let timed = std::thread::scope(|scope| {
            let thread =
                scope.spawn(|| self.prepare_thread(host).and_then(|()| time(&mut command)));
            thread.join()
        });
        timed.unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))
    }

    fn command(&self, host: Host) -> Command {
        match host {
            Host::ForkExec => system("true"),
            Host::Python => {
                let mut command = system("python3");
                command.args(["-c", "print(1)"]);
                command
            }
            Host::Bubblewrap => {
                let mut command = system("bwrap");
                command.args(["--unshare-all", "--ro-bind", "/", "/"]);
                command.args(["--proc", "/proc", "--dev", "/dev", "/bin/true"]);
                command
            }
            Host::Crun | Host::Runc => self.run_once(self.oci(host.program())),
            Host::RunscRun => self.run_once(self.runsc()),
            Host::RunscExec => {
                let mut command = self.runsc();
                command.arg("exec").arg(self.id(STAYS)).arg("/bin/true");
                command
            }
            Host::Podman => {
                let mut command = system("podman");
                command.args(["run", "--rm", "--network=none"]);
                for dir in self.bundles.host_dirs() {
                    command.arg(format!("--volume={dir}:{dir}:ro"));
                }
                command.arg("--rootfs").arg(self.bundles.root());
                command.arg("/bin/true");
                command
            }
        }
    }

    /// A runtime that keeps what it knows in our directory.
    fn oci(&self, program: &str) -> Command {
        let mut command = system(program);
        command.arg("--root").arg(self.dir.path().join(program));
        command
    }

    /// As the server's driver starts it, where that matters for its speed.
    fn runsc(&self) -> Command {
        let mut command = self.oci("runsc");
        command.args(["--network=none", "--ignore-cgroups", "--platform=systrap"]);
        command
    }

    fn run_once(&self, mut runtime: Command) -> Command {
        let number = self.containers.fetch_add(1, Ordering::Relaxed);
        let bundle = self.bundles.bundle(ONCE);
        runtime.args(["run", "--bundle"]).arg(bundle);
        runtime.arg(self.id(number));
        runtime
    }

    /// Of the container with this name or number.
    fn id(&self, name: impl Display) -> String {
        format!("{}-{name}", self.id_prefix)
    }

    /// Ends what is still there of a runtime's containers.
    fn remove_containers(&self, mut list: Command, delete: impl Fn() -> Command) {
        let Ok(listed) = list
            .args(["list", "--quiet"])
            .stdout(Stdio::piped())
            .output()
        else {
            return;
        };
        for id in String::from_utf8_lossy(&listed.stdout).split_whitespace() {
            let _ = delete().args(["delete", "--force", id]).status();
        }
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        for runtime in ["crun", "runc"] {
            // Made by its first container.
            if self.dir.path().join(runtime).exists() {
                let _ = std::thread::scope(|scope| {
                    let remove = || {
                        let _ = hide_unified();
                        self.remove_containers(self.oci(runtime), || self.oci(runtime));
                    };
                    scope.spawn(remove).join()
                });
            }
        }
        if self.dir.path().join("runsc").exists() {
            self.remove_containers(self.runsc(), || self.runsc());
        }
    }
}

/// A program that nobody hears.
pub(super) fn quiet(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// A program of the host that a sandbox would find by that name, with as few variables: somebody's
/// wrapper further up in PATH is not what a sandbox is compared with.
pub(super) fn system(program: &str) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(SANDBOX_PATH).chain(std::env::split_paths(&path));
    let mut files = dirs.map(|dir| dir.join(program));
    let mut command = quiet(files.find(|file| file.is_file()).unwrap_or(program.into()));
    command
        .env_clear()
        .env("PATH", SANDBOX_PATH)
        .env("LANG", "C.UTF-8");
    if let Some(home) = std::env::home_dir() {
        command.env("HOME", home);
    }
    command
}

/// From start to end, which must be a good one.
pub(super) fn time(command: &mut Command) -> io::Result<Duration> {
    let start = Instant::now();
    let status = command.status()?;
    let took = start.elapsed();
    match status.success() {
        true => Ok(took),
        false => Err(io::Error::other(status.to_string())),
    }
}

#[cfg(target_os = "linux")]
fn hide_unified() -> io::Result<()> {
    use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
    super::sys::unshare_mounts()?;
    // Else it would be gone for everybody.
    mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )?;
    unmount(UNIFIED, UnmountFlags::DETACH)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn hide_unified() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::RuntimeKind;

    #[test]
    fn what_works_is_measured_and_what_does_not_is_told() {
        let mut notes = Vec::new();
        let all = [RuntimeKind::Native, RuntimeKind::Gvisor]
            .map(Host::beside)
            .concat();
        let programs = Programs::find(&all, &mut notes).unwrap();
        assert!(programs.usable().contains(&Host::ForkExec));
        for host in programs.usable() {
            assert!(programs.time(*host).unwrap() > Duration::ZERO, "{host:?}");
        }
        for host in all {
            let told = notes
                .iter()
                .any(|note| note.contains(host.name()) || note.contains(host.program()));
            assert!(
                programs.usable().contains(&host) || told,
                "{host:?}: {notes:?}"
            );
        }
        let dir = programs.dir.path().to_owned();
        drop(programs);
        assert!(!dir.exists());
    }

    #[test]
    fn two_benchmarks_at_once_do_not_end_each_others_containers() {
        const ROUNDS: usize = 10;
        let runtimes = [Host::Crun, Host::Runc];
        let both = [(); 2].map(|()| Programs::find(&runtimes, &mut Vec::new()).unwrap());
        let [one, other] = [&both[0], &both[1]].map(|programs| {
            let command = programs.command(Host::Crun);
            command.get_args().last().unwrap().to_owned()
        });
        assert_ne!(one, other);
        std::thread::scope(|scope| {
            for programs in &both {
                scope.spawn(|| {
                    for host in programs.usable().repeat(ROUNDS) {
                        programs.time(host).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_program_that_fails_is_not_measured() {
        assert!(time(&mut system("false")).is_err());
        let missing = time(&mut system("k8e-no-such-program")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
