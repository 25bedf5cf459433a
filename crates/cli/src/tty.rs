//! The user's terminal (termios): raw mode and hidden input, restored on drop; size and signals.

use crate::failure::Failure;
use std::io::IsTerminal as _;

/// Whether standard input and output are terminals.
pub(crate) fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Raw mode while it is held: every key is passed through, also Ctrl-C. Dropping it restores the terminal.
pub(crate) struct RawMode(imp::Saved);

// === impl RawMode ===

impl RawMode {
    pub(crate) fn enter() -> Result<Self, Failure> {
        imp::enter()
            .map(Self)
            .map_err(|e| Failure::io("set the terminal to raw mode", &e))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        imp::leave(&self.0);
    }
}

/// Input without echo while it is held. Dropping it restores the terminal; Ctrl-C drops it too, since it cancels the
/// command and does not kill the process.
pub(crate) struct NoEcho(imp::Saved);

// === impl NoEcho ===

impl NoEcho {
    pub(crate) fn enter() -> Result<Self, Failure> {
        imp::hide()
            .map(Self)
            .map_err(|e| Failure::io("turn off the echo of the terminal", &e))
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        imp::leave(&self.0);
    }
}

/// Rows and columns of the terminal; 0 when unknown.
pub(crate) fn size() -> (u32, u32) {
    imp::size()
}

pub(crate) use imp::Signals;

#[cfg(unix)]
mod imp {
    use rustix::termios::{
        LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr,
    };
    use std::io;
    use tokio::signal::unix::{Signal, SignalKind, signal};

    pub(super) type Saved = Termios;

    pub(super) fn enter() -> io::Result<Saved> {
        let saved = tcgetattr(io::stdin())?;
        let mut raw = saved.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(saved)
    }

    pub(super) fn hide() -> io::Result<Saved> {
        let saved = tcgetattr(io::stdin())?;
        let mut hidden = saved.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Flush, &hidden)?;
        Ok(saved)
    }

    pub(super) fn leave(saved: &Saved) {
        // Fails when the terminal is closed; then there is nothing to restore.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, saved);
    }

    pub(super) fn size() -> (u32, u32) {
        match tcgetwinsize(io::stdin()) {
            Ok(size) => (size.ws_row.into(), size.ws_col.into()),
            Err(_) => (0, 0),
        }
    }

    /// Signals about the terminal, and those that terminate the process.
    pub(crate) struct Signals {
        resized: Signal,
        ends: [(i32, Signal); 3],
    }

    impl Signals {
        pub(crate) fn new() -> io::Result<Self> {
            let end = |kind: SignalKind| Ok::<_, io::Error>((kind.as_raw_value(), signal(kind)?));
            Ok(Self {
                resized: signal(SignalKind::window_change())?,
                ends: [
                    end(SignalKind::hangup())?,
                    end(SignalKind::interrupt())?,
                    end(SignalKind::terminate())?,
                ],
            })
        }

        /// Waits for a signal: `None` for a window size change, or the number of a terminating signal.
        pub(crate) async fn next(&mut self) -> Option<i32> {
            let [hangup, interrupt, terminate] = &mut self.ends;
            tokio::select! {
                _ = self.resized.recv() => None,
                _ = hangup.1.recv() => Some(hangup.0),
                _ = interrupt.1.recv() => Some(interrupt.0),
                _ = terminate.1.recv() => Some(terminate.0),
            }
        }
    }
}

#[cfg(not(unix))]
mod imp {
    use std::io;

    pub(super) type Saved = ();

    pub(super) fn enter() -> io::Result<Saved> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "interactive shells work on Unix only",
        ))
    }

    pub(super) fn hide() -> io::Result<Saved> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "give the value on standard input, from a pipe or a file",
        ))
    }

    pub(super) fn leave((): &Saved) {}

    pub(super) fn size() -> (u32, u32) {
        (0, 0)
    }

    /// Signals about the terminal, and those that terminate the process.
    pub(crate) struct Signals;

    impl Signals {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        /// Waits for Ctrl-C.
        pub(crate) async fn next(&mut self) -> Option<i32> {
            tokio::signal::ctrl_c().await.ok();
            Some(2)
        }
    }
}
