//! PID 1 (init) of a sandbox: serves calls and reaps processes. It has no environment and no standard output.
//!
//! | arguments | |
//! |---|---|
//! | none | takes the listening socket at descriptor 3 |
//! | `--listen PATH NEXT` | binds its own, where the sandbox's kernel cannot take one from outside (gVisor); after a |
//! | | checkpoint at NEXT |
//! | `--self-test` | forks and reaps a process; the result is the exit code |

use k8e_guest::{Config, SocketNames};
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

/// `started_held` in gVisor, where a small command takes longer.
const STARTED_HELD: Duration = Duration::from_millis(30);

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run(args: &[OsString]) -> io::Result<()> {
    match args {
        [] => serve(k8e_guest::inherited_listener()?.into(), None),
        [option, path, next] if option == "--listen" => {
            let names = SocketNames::new(path.as_ref(), next.as_ref());
            serve(StdListener::bind(path)?, Some(names))
        }
        [option] if option == "--self-test" => k8e_guest::self_test(),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// `names`: the names of the socket, if the kernel inside is gVisor's sentry.
fn serve(listener: StdListener, names: Option<SocketNames>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // The name in `ps`; otherwise it is the name of the memfd that was executed.
    let _ = rustix::thread::set_name(c"k8e-guest");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener)?;
        // No other signal gets a handler: the kernel drops signals from inside that PID 1 does not handle.
        // Registered here so that commands get it reset.
        let _child = signal(SignalKind::child())?;
        let mut config = if std::process::id() == 1 {
            Config::for_init()
        } else {
            Config::default()
        };
        if names.is_some() {
            config.started_held = STARTED_HELD;
            config.processes_max = k8e_guest::process_limit();
        }
        k8e_guest::serve(listener, names, config).await;
        Ok(())
    })
}
