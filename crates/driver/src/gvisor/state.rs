//! Saved sandboxes: memory (a checkpoint of the sentry) and disk, without a process; and the same of a sandbox that
//! goes on, for copies of it ([`copy`]).
//!
//! ```text
//! <driver>/states/<id>.new/  being saved: memory/, and state.json once that is complete
//! <driver>/states/<id>/      state.json  memory/  disk.img  guest
//! ```
//!
//! A sandbox is either alive or saved. It is killed when its memory is complete on disk, and then its disk, which is a
//! file of its own, is moved: a server that dies in between finds `state.json` and the disk, and finishes
//! ([`finish`]). A sandbox is restored from copies, so that the state stays as it was until the server has seen the
//! restored sandbox work and removes it ([`forget`]).
//!
//! A copied state has an id of its own, which is no sandbox's, so that a server that finds one after a crash removes it.
//! What is launched from it has another uid range, so its disk, whose files belong to the range of the first sandbox
//! they were written by, is mounted with these owners mapped to the new ones.
//!
//! Clean pages of programs are no part of a checkpoint; the sentry reads them again from the files. So a state is
//! restored with its own guest, and when runsc, the CPU or the host's programs have changed, only its files are.

use super::control::Control;
use super::launch::{GUEST, STATE};
use super::runsc::{Platform, Runsc};
use super::socket;
use crate::local::disk;
use crate::local::sandboxes::Sandboxes;
use crate::{DriverError, SandboxSpec};
use k8e_model::{Limits, SandboxId, Template};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const STATES: &str = "states";
const MEMORY: &str = "memory";
const STATE_FILE: &str = "state.json";
const LAUNCH_FILE: &str = "launch.json";

/// What changes when the host's programs do: package databases and the cache of shared libraries.
const HOST_PROGRAMS: [&str; 4] = [
    "/var/lib/dpkg/status",
    "/var/lib/rpm/rpmdb.sqlite",
    "/lib/apk/db/installed",
    "/etc/ld.so.cache",
];

/// How a sandbox was launched: in its directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Launched {
    pub(crate) runsc: Runsc,
    pub(crate) platform: Platform,
    pub(crate) spec: SandboxSpec,
    /// Sizes and times of [`HOST_PROGRAMS`].
    programs: Vec<(u64, i64)>,
    /// What root inside is on the disk, where the sandbox is a copy; else its own uid.
    #[serde(default)]
    pub(crate) disk_uid_base: Option<u32>,
}

/// A saved sandbox: `state.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) launched: Launched,
    pub(crate) uid_base: u32,
    /// The CPU's features.
    cpu: String,
    /// Name of the guest's socket at the checkpoint: an index into [`socket::NAMES`].
    socket: usize,
}

/// What a sandbox is continued from.
pub(crate) struct Memory {
    pub(super) image: PathBuf,
    pub(super) socket: &'static str,
}

// === impl Launched ===

impl Launched {
    pub(super) fn new(
        runsc: &Runsc,
        platform: Platform,
        spec: &SandboxSpec,
        disk_uid_base: Option<u32>,
    ) -> Self {
        Self {
            disk_uid_base,
            runsc: runsc.clone(),
            platform,
            spec: spec.clone(),
            programs: programs(&spec.template),
        }
    }

    pub(super) fn write(&self, dir: &Path) -> Result<(), DriverError> {
        write(&dir.join(LAUNCH_FILE), self)
    }

    fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(LAUNCH_FILE)).ok()?).ok()
    }

    /// The runsc that it was launched with, if it is still there.
    fn runsc(&self) -> Result<&Path, String> {
        match Runsc::at(&self.runsc.path) {
            Some(there) if there == self.runsc => Ok(&self.runsc.path),
            _ => Err(format!(
                "{} is not the runsc that it was made with any more",
                self.runsc.path.display()
            )),
        }
    }
}

// === impl Saved ===

impl Saved {
    /// Of a sandbox that is saved, completely.
    pub(crate) fn read(sandboxes: &Sandboxes, id: &SandboxId) -> Option<Self> {
        Self::read_in(&state_dir(sandboxes, id))
    }

    fn read_in(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join(STATE_FILE)).ok()?).ok()
    }

    /// What root inside is on its disk.
    pub(crate) fn disk_uid_base(&self) -> u32 {
        self.launched.disk_uid_base.unwrap_or(self.uid_base)
    }

    /// What it is continued from, or why only its files can be. `state` is its id.
    pub(crate) fn memory(
        &self,
        sandboxes: &Sandboxes,
        state: &SandboxId,
    ) -> Result<Memory, String> {
        self.launched.runsc()?;
        if self.cpu != cpu() {
            return Err(
                "this machine's CPU has other features than the one it was saved on".to_owned(),
            );
        }
        if self.launched.programs != programs(&self.launched.spec.template) {
            return Err("programs of the host were upgraded since it was made".to_owned());
        }
        let socket = socket::NAMES.get(self.socket).copied();
        Ok(Memory {
            image: state_dir(sandboxes, state).join(MEMORY),
            socket: socket.ok_or("its state is of another version of the server")?,
        })
    }

    /// Copies the disk and guest of a state to the directory of the sandbox that is launched from it.
    pub(crate) fn copy_to(
        sandboxes: &Sandboxes,
        state: &SandboxId,
        dir: &Path,
    ) -> Result<(), DriverError> {
        let from = state_dir(sandboxes, state);
        let image = from.join(disk::FILE);
        disk::wait_detached(&image)?;
        disk::copy(&image, &dir.join(disk::FILE))?;
        fs::hard_link(from.join(GUEST), dir.join(GUEST)).map_err(DriverError::step(
            "link",
            dir.join(GUEST).display().to_string(),
        ))
    }
}

/// A running sandbox that can be saved.
struct Savable {
    saved: Saved,
    pid: i32,
    init: OwnedFd,
    dir: PathBuf,
}

// === impl Savable ===

impl Savable {
    /// A sandbox whose guest has closed its socket, or why it cannot be saved.
    fn find(sandboxes: &Sandboxes, id: &SandboxId) -> Result<Self, DriverError> {
        let refused = |why: &str| DriverError::Unusable(why.to_owned());
        let gone =
            || DriverError::step("find", id.to_string())(io::Error::from(io::ErrorKind::NotFound));
        let (record, init) = sandboxes.find(id)?.ok_or_else(gone)?;
        let dir = sandboxes.sandbox(id);
        let launched = Launched::read(&dir)
            .ok_or_else(|| refused("it was made by an earlier version of the server"))?;
        if !dir.join(disk::FILE).exists() {
            return Err(refused(
                "what it writes is kept in memory (there are no loop devices, or --memory-disks is set)",
            ));
        }
        launched.runsc().map_err(DriverError::Unusable)?;
        let name = socket::bound(&dir).ok_or_else(|| refused("its agent has no socket"))?;
        disk::check_free(&dir, memory_bytes(sandboxes, id))?;
        let socket = socket::NAMES.iter().position(|n| *n == name);
        let saved = Saved {
            uid_base: record.uid_base,
            cpu: cpu(),
            socket: socket.unwrap_or_default(),
            launched,
        };
        Ok(Self {
            saved,
            pid: record.pid,
            init,
            dir,
        })
    }

    fn control(&self, image: &Path) -> Result<Control<'_>, DriverError> {
        let runsc = &self.saved.launched.runsc.path;
        Control::enter(runsc, &self.dir.join(STATE), Some(image))
    }
}

/// Makes the directory of a new state, and in it that of its memory.
fn make_new(new: &Path) -> Result<PathBuf, DriverError> {
    remove_dir(new)?;
    let memory = new.join(MEMORY);
    crate::local::make_private_dir(&memory)?;
    Ok(memory)
}

/// Saves a sandbox whose guest has closed its socket, and kills it. On failure it runs on.
pub(crate) fn save(sandboxes: &Sandboxes, id: &SandboxId) -> Result<(), DriverError> {
    let savable = Savable::find(sandboxes, id)?;
    let init = &savable.init;
    let new = new_dir(sandboxes, id);
    let memory = make_new(&new)?;
    let saved = savable
        .control(&memory)
        .and_then(|control| checkpoint(&control))
        .and_then(|()| {
            for file in fs::read_dir(&memory).into_iter().flatten().flatten() {
                sync(&file.path())?;
            }
            write(&new.join(STATE_FILE), &savable.saved)?;
            sync(&new.join(STATE_FILE))
        });
    if let Err(error) = saved {
        remove_dir(&new)?;
        return Err(error);
    }
    match rustix::process::pidfd_send_signal(init, Signal::KILL) {
        Err(rustix::io::Errno::SRCH) => {}
        done => done.map_err(DriverError::step("kill", id.to_string()))?,
    }
    finish(sandboxes, id).map(drop)
}

/// Writes the state of a sandbox whose guest has closed its socket, and lets it go on. How long its processes were
/// stopped. On failure it goes on too, but its guest may not listen ([`run_on`]).
///
/// The disk is copied while nothing runs, after the sentry has written what it caches, for the checkpoint, and the
/// kernel what it does. Nothing is forced to the host's disk: a crash ends what the copies are for.
pub(crate) fn copy(
    sandboxes: &Sandboxes,
    id: &SandboxId,
    state: &SandboxId,
) -> Result<Duration, DriverError> {
    let savable = Savable::find(sandboxes, id)?;
    let new = new_dir(sandboxes, state);
    let memory = make_new(&new)?;
    let copied = savable.control(&memory).and_then(|control| {
        let begun = Instant::now();
        checkpoint(&control)?;
        let image = savable.dir.join(disk::FILE);
        let copied =
            disk::write_back(&image).and_then(|()| disk::copy(&image, &new.join(disk::FILE)));
        control.resume()?;
        copied.map(|()| begun.elapsed())
    });
    let completed = copied.and_then(|stopped| {
        socket::bind_again(sandboxes, id, savable.pid, savable.saved.uid_base)?;
        let guest = new.join(GUEST);
        fs::hard_link(savable.dir.join(GUEST), &guest)
            .map_err(DriverError::step("link", guest.display().to_string()))?;
        write(&new.join(STATE_FILE), &savable.saved)?;
        let state = state_dir(sandboxes, state);
        fs::rename(&new, &state).map_err(DriverError::step("keep", state.display().to_string()))?;
        Ok(stopped)
    });
    if completed.is_err() {
        remove_dir(&new)?;
    }
    completed
}

/// Completes the state of a sandbox that was killed for it, also after a crash. Whether there is one.
pub(crate) fn finish(sandboxes: &Sandboxes, id: &SandboxId) -> Result<bool, DriverError> {
    let (new, state) = (new_dir(sandboxes, id), state_dir(sandboxes, id));
    if Saved::read_in(&new).is_some() {
        sandboxes.end_processes(id)?;
        let dir = sandboxes.sandbox(id);
        for file in [disk::FILE, GUEST] {
            let (from, to) = (dir.join(file), new.join(file));
            match fs::rename(&from, &to) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && to.exists() => {}
                done => done.map_err(DriverError::step("keep", from.display().to_string()))?,
            }
        }
        disk::wait_detached(&new.join(disk::FILE))?;
        sync(&new.join(disk::FILE))?;
        sync(&new)?;
        fs::rename(&new, &state).map_err(DriverError::step("keep", state.display().to_string()))?;
        sync(state.parent().unwrap_or(&state))?;
    }
    let saved = Saved::read(sandboxes, id).is_some();
    if saved {
        sandboxes.remove_live(id)?;
    }
    Ok(saved)
}

/// Lets a sandbox run on that was to be saved and is not: its guest binds its socket again.
pub(crate) fn run_on(sandboxes: &Sandboxes, id: &SandboxId) -> Result<(), DriverError> {
    if !crate::guest::is_refused(&sandboxes.socket(id)) {
        return Ok(());
    }
    let gone =
        || DriverError::step("find", id.to_string())(io::Error::from(io::ErrorKind::NotFound));
    let (record, _) = sandboxes.find(id)?.ok_or_else(gone)?;
    let dir = sandboxes.sandbox(id);
    if let Some(launched) = Launched::read(&dir)
        && let Ok(runsc) = launched.runsc()
    {
        let control = Control::enter(runsc, &dir.join(STATE), None)?;
        // An error when it is not paused.
        let _ = control.resume();
    }
    remove_dir(&new_dir(sandboxes, id))?;
    socket::bind_again(sandboxes, id, record.pid, record.uid_base)
}

/// Removes a state, complete or not.
pub(crate) fn forget(sandboxes: &Sandboxes, id: &SandboxId) -> Result<(), DriverError> {
    remove_dir(&new_dir(sandboxes, id))?;
    let state = state_dir(sandboxes, id);
    // It goes last to first: without it nothing is listed.
    match fs::remove_file(state.join(STATE_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(DriverError::step("remove", state.display().to_string())(
                error,
            ));
        }
        _ => {}
    }
    remove_dir(&state)
}

/// Ids of which there is a state, complete or not.
pub(crate) fn ids(driver_dir: &Path) -> Vec<SandboxId> {
    let entries = fs::read_dir(driver_dir.join(STATES)).into_iter().flatten();
    let name = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_str()?;
        name.strip_suffix(".new").unwrap_or(name).parse().ok()
    };
    entries.flatten().filter_map(name).collect()
}

/// Whether there is a state, complete or not.
pub(crate) fn exists(sandboxes: &Sandboxes, id: &SandboxId) -> bool {
    new_dir(sandboxes, id).exists() || state_dir(sandboxes, id).exists()
}

/// The directory of a state.
pub(crate) fn state_dir(sandboxes: &Sandboxes, id: &SandboxId) -> PathBuf {
    sandboxes.dir().join(STATES).join(id.as_str())
}

fn new_dir(sandboxes: &Sandboxes, id: &SandboxId) -> PathBuf {
    sandboxes.dir().join(STATES).join(format!("{id}.new"))
}

/// Writes a checkpoint and leaves the sandbox paused; when that fails it runs on.
fn checkpoint(control: &Control<'_>) -> Result<(), DriverError> {
    let written = control.pause().and_then(|()| control.checkpoint());
    if written.is_err() {
        // The error that matters is the first; a sandbox that cannot go on has died.
        let _ = control.resume();
    }
    written
}

fn memory_bytes(sandboxes: &Sandboxes, id: &SandboxId) -> u64 {
    let Some((mut total, _)) = sandboxes.group(id).memory_use() else {
        return 0;
    };
    let mut text = String::new();
    let _ = total.read_to_string(&mut text);
    text.trim().parse().unwrap_or(0)
}

fn programs(template: &Template) -> Vec<(u64, i64)> {
    match template {
        Template::Host => HOST_PROGRAMS
            .iter()
            .map(|path| fs::metadata(path).map_or((0, 0), |meta| (meta.len(), meta.mtime())))
            .collect(),
        // Layers never change.
        Template::Image { .. } => Vec::new(),
    }
}

/// The features of the first CPU, as the kernel lists them.
fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = |line: &&str| line.starts_with("flags") || line.starts_with("Features");
    text.lines().find(flags).unwrap_or_default().to_owned()
}

fn write(path: &Path, value: &impl Serialize) -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("write", path.display().to_string());
    let text = serde_json::to_vec(value)
        .map_err(io::Error::other)
        .map_err(step())?;
    let new = path.with_extension("part");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, path))
        .map_err(step())
}

fn sync(path: &Path) -> Result<(), DriverError> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(DriverError::step("sync", path.display().to_string()))
}

fn remove_dir(path: &Path) -> Result<(), DriverError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.map_err(DriverError::step("remove", path.display().to_string())),
    }
}

/// The specification of a sandbox that is launched from a state: `limits` are those that it has now, not those of the
/// first launch.
pub(crate) fn spec_with(saved: &Saved, id: &SandboxId, limits: &Limits) -> SandboxSpec {
    SandboxSpec {
        id: id.clone(),
        limits: *limits,
        ..saved.launched.spec.clone()
    }
}
