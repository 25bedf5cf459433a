//! The launcher's own end: the process that forks.

use super::channel::Channel;
use super::{Answer, Failure, Order, Ready, Told};
use crate::DriverError;
use crate::gvisor::child as gvisor;
use crate::local::cgroup::Join;
use crate::local::rootfs::{self, Rootfs};
use crate::local::skeleton;
use crate::local::sys::{self, Fork};
use crate::local::userns::user_namespace;
use crate::native::child::{self, Handles};
use crate::native::seccomp::Filters;
use crate::native::sockets::Sockets;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

/// The launcher process: what `main` runs when its first argument is [`super::LAUNCHER_ARG`].
///
/// Must be called before anything starts a thread.
pub fn launcher_main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        // There is no subscriber for tracing in this process; standard error is the server's log.
        Err(error) => {
            let _ = writeln!(io::stderr(), "k8e-launcher: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<(), DriverError> {
    let step = || DriverError::step::<io::Error>("serve", "the launcher's channel");
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(step())?;
    let channel = Channel::from(sys::move_up(stdin).map_err(step())?);
    let null = fs::File::open("/dev/null").map_err(DriverError::step("open", "/dev/null"))?;
    rustix::stdio::dup2_stdin(&null).map_err(DriverError::step("set", "standard input"))?;
    drop(null);
    let Some(((), fds)) = channel.receive::<()>().map_err(step())? else {
        return Ok(());
    };
    let Ok([guest, _lock]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Ok(());
    };
    let (guest, _lock) = (
        sys::move_up(guest).map_err(step())?,
        sys::move_up(_lock).map_err(step())?,
    );
    let confinement = match start() {
        Ok((confinement, ready)) => {
            channel
                .send(&Ok::<_, Failure>(ready), &[])
                .map_err(step())?;
            confinement
        }
        Err(error) => {
            return channel
                .send(&Err::<Ready, _>(Failure::from(&error)), &[])
                .map_err(step());
        }
    };
    while let Some((order, fds)) = channel.receive::<Order>().map_err(step())? {
        let mut fds = fds.into_iter();
        let Some(status) = fds.next() else {
            continue;
        };
        match obey(&order, &guest, status, fds.next(), &confinement) {
            Ok((pid, pidfd)) => channel.send(&Answer::Forked { pid }, &[pidfd.as_fd()]),
            Err(error) => channel.send(&Answer::Failed(Failure::from(&error)), &[]),
        }
        .map_err(step())?;
    }
    Ok(())
}

/// What confines every native sandbox, whichever it is.
struct Confinement {
    filters: Filters,
    sockets: Sockets,
}

fn start() -> Result<(Confinement, Ready), DriverError> {
    sys::ignore_children();
    let sockets = Sockets::start()?;
    // What runsc leaves running becomes our child when runsc ends, and so is reaped.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(DriverError::step("become", "a subreaper"))?;
    // Sees unmounts of the host, shows it none of ours.
    sys::unshare(UnshareFlags::NEWNS).map_err(DriverError::step("make", "a mount namespace"))?;
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", slave).map_err(DriverError::step("make slave", "/"))?;
    let filters = Filters::compile()
        .map_err(|error| DriverError::step("compile", "seccomp")(io::Error::other(error)))?;
    let userns = user_namespace(1 << 30)?;
    let idmap = rootfs::overlay_takes_idmapped_layers()
        && skeleton::layers()
            .iter()
            .all(|layer| rootfs::can_idmap(userns.as_fd(), &layer.host));
    let no_network = k8e_egress::wire::check().err();
    let no_network = no_network.map(|error| error.to_string());
    Ok((
        Confinement { filters, sockets },
        Ready { idmap, no_network },
    ))
}

fn obey(
    order: &Order,
    guest: &OwnedFd,
    status: OwnedFd,
    listener: Option<OwnedFd>,
    confinement: &Confinement,
) -> Result<(i32, OwnedFd), DriverError> {
    let step = || DriverError::step::<io::Error>("prepare", "a launch");
    let status = sys::move_up(status).map_err(step())?;
    let listener = listener.map(sys::move_up).transpose().map_err(step())?;
    match order {
        Order::Native(setup) => {
            let listener = listener.ok_or(DriverError::LauncherGone)?;
            let namespaces = libc::CLONE_NEWNS
                | libc::CLONE_NEWPID
                | libc::CLONE_NEWNET
                | libc::CLONE_NEWIPC
                | libc::CLONE_NEWUTS;
            launch(namespaces, &setup.join, &setup.rootfs, &status, |userns| {
                let handles = Handles {
                    guest,
                    listener,
                    userns,
                    sockets: &confinement.sockets,
                };
                let failed = child::become_guest(setup, handles, &confinement.filters);
                Told::Failed(Failure::from(&failed))
            })
        }
        Order::Gvisor(setup) => launch(
            libc::CLONE_NEWNS,
            &setup.join,
            &setup.rootfs,
            &status,
            |userns| {
                gvisor::run(setup, userns.as_fd())
                    .unwrap_or_else(|error| Told::Failed(Failure::from(&error)))
            },
        ),
    }
}

/// Forks into `namespaces` and the control group; the child does `work`, says what came of it, and ends.
fn launch(
    namespaces: i32,
    join: &Join,
    rootfs: &Rootfs,
    status: &OwnedFd,
    work: impl FnOnce(OwnedFd) -> Told,
) -> Result<(i32, OwnedFd), DriverError> {
    let step = || DriverError::step::<io::Error>("prepare", "a launch");
    let userns = sys::move_up(user_namespace(rootfs.uid_base)?).map_err(step())?;
    let cgroup = match join {
        Join::Born(dir) => {
            let opened =
                fs::File::open(dir).map_err(DriverError::step("open", dir.display().to_string()));
            Some(OwnedFd::from(opened?))
        }
        Join::Write(_) => None,
    };
    let forked = sys::fork_into(
        u64::from(namespaces.unsigned_abs()),
        cgroup.as_ref().map(OwnedFd::as_fd),
    );
    match forked.map_err(DriverError::step("fork", "the sandbox"))? {
        Fork::Parent { pid, pidfd } => Ok((pid, pidfd)),
        Fork::Child => {
            let told = serde_json::to_vec(&work(userns)).unwrap_or_default();
            let _ = rustix::io::write(status, &told);
            sys::exit_now(0)
        }
    }
}
