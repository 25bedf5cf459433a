//! Commands of runsc about a running sandbox: pause, checkpoint, resume. In a mount namespace of their own, in which
//! runsc's state is where it was at the launch.

use super::child::{STAGE, STATE, wait, why};
use crate::DriverError;
use crate::local::rootfs::{SAFE, attach, clone_mount, make_dir, mount};
use crate::local::sys;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Deadline of `pause` and `resume`, which take some 30 ms.
const COMMAND_WAIT: Duration = Duration::from_secs(30);

/// Deadline of a checkpoint: the largest sandbox to a slow disk.
const CHECKPOINT_WAIT: Duration = Duration::from_secs(300);

/// In the stage: where a checkpoint is written and read.
pub(super) const IMAGE: &str = "image";

/// The mount namespace of this process, with the stage of one sandbox.
pub(super) struct Control<'a> {
    runsc: &'a Path,
}

// === impl Control ===

impl<'a> Control<'a> {
    /// Enters it. `state` is runsc's own directory of the sandbox, `image` that of the checkpoint.
    pub(super) fn enter(
        runsc: &'a Path,
        state: &Path,
        image: Option<&Path>,
    ) -> Result<Self, DriverError> {
        sys::unshare(UnshareFlags::NEWNS)
            .map_err(DriverError::step("make", "a mount namespace"))?;
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private)
            .map_err(DriverError::step("make private", "/"))?;
        // Before the stage covers what may lead there.
        let state = clone_mount(state)?;
        let image = image.map(clone_mount).transpose()?;
        mount("k8e", STAGE, "tmpfs", SAFE, "mode=0700,size=1m")?;
        rustix::process::chdir(STAGE).map_err(DriverError::step("enter", STAGE))?;
        make_dir(Path::new(STATE))?;
        attach(&state, Path::new(STATE))?;
        if let Some(image) = image {
            make_dir(Path::new(IMAGE))?;
            attach(&image, Path::new(IMAGE))?;
        }
        Ok(Self { runsc })
    }

    /// Stops all programs inside.
    pub(super) fn pause(&self) -> Result<(), DriverError> {
        self.run(&["pause"], COMMAND_WAIT)
    }

    /// Writes a checkpoint of a paused sandbox. One that fails leaves it as it was.
    pub(super) fn checkpoint(&self) -> Result<(), DriverError> {
        let image = format!("--image-path={STAGE}/{IMAGE}");
        let args = [
            "checkpoint",
            "--leave-running",
            "--compression=none",
            image.as_str(),
        ];
        self.run(&args, CHECKPOINT_WAIT)
    }

    /// Undoes `pause`.
    pub(super) fn resume(&self) -> Result<(), DriverError> {
        self.run(&["resume"], COMMAND_WAIT)
    }

    fn run(&self, args: &[&str], limit: Duration) -> Result<(), DriverError> {
        let what = format!("runsc {}", args.first().copied().unwrap_or_default());
        let step = || DriverError::step::<io::Error>("run", what.clone());
        let _ = std::fs::remove_file("log");
        let mut child = Command::new(self.runsc)
            .arg(format!("--root={STAGE}/{STATE}"))
            .arg(format!("--log={STAGE}/log"))
            .args(args)
            .arg("sandbox")
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(step())?;
        let status = wait(&mut child, limit).map_err(step())?;
        match status.success() {
            true => Ok(()),
            false => Err(step()(io::Error::other(why(status)))),
        }
    }
}

impl Drop for Control<'_> {
    /// What the stage covers is there again for this process.
    fn drop(&mut self) {
        let _ = rustix::process::chdir("/");
        let _ = rustix::mount::unmount(STAGE, UnmountFlags::DETACH);
    }
}
