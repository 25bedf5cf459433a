//! PID 1 of a sandbox. Takes the listening socket at descriptor 3, serves, reaps. No arguments,
//! no environment, nothing to print to.

use k8e_guest::Config;
use std::process::ExitCode;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run() -> std::io::Result<()> {
    let listener = std::os::unix::net::UnixListener::from(k8e_guest::inherited_listener()?);
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
        let config = if std::process::id() == 1 {
            Config::for_init()
        } else {
            Config::default()
        };
        k8e_guest::serve(listener, config).await;
        Ok(())
    })
}
