//! PID 1 of a sandbox. Serves and reaps. No environment, nothing to print to.
//!
//! | arguments | |
//! |---|---|
//! | none | takes the listening socket at descriptor 3 |
//! | `--listen PATH` | binds its own, where the sandbox's kernel cannot take one from outside (gVisor) |
//! | `--self-test` | makes a process and reaps it; how that went is the exit code |

use k8e_guest::Config;
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

/// In gVisor, where everything that a small command does takes longer.
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
        [option, path] if option == "--listen" => {
            serve(StdListener::bind(path)?, Some(STARTED_HELD))
        }
        [option] if option == "--self-test" => k8e_guest::self_test(),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn serve(listener: StdListener, started_held: Option<Duration>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // What `ps` shows; else it is the name of the memory file we are executed from.
    let _ = rustix::thread::set_name(c"k8e-guest");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener)?;
        // No other signal gets a handler: what PID 1 does not handle, nobody inside can send it.
        // Registered here so that the guest knows to reset it in commands.
        let _child = signal(SignalKind::child())?;
        let mut config = if std::process::id() == 1 {
            Config::for_init()
        } else {
            Config::default()
        };
        config.started_held = started_held.unwrap_or(config.started_held);
        k8e_guest::serve(listener, config).await;
        Ok(())
    })
}
