//! The terminal that a person sits at: raw while something else is in charge, as it was afterwards.

use crate::failure::Failure;
use std::io::IsTerminal as _;

/// Whether a person sits at both ends.
pub(crate) fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// While it is held, every key goes through as it is, also Ctrl-C. Dropping it puts the terminal
/// back, whatever happened.
pub(crate) struct RawMode(imp::Saved);

// === impl RawMode ===

impl RawMode {
    pub(crate) fn enter() -> Result<Self, Failure> {
        imp::enter()
            .map(Self)
            .map_err(|e| Failure::io("change the terminal", &e))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        imp::leave(&self.0);
    }
}

/// While it is held, what is typed is not shown. Dropping it puts the terminal back; an interrupt
/// drops it too, since Ctrl-C ends the wait and not the process.
pub(crate) struct NoEcho(imp::Saved);

// === impl NoEcho ===

impl NoEcho {
    pub(crate) fn enter() -> Result<Self, Failure> {
        imp::hide()
            .map(Self)
            .map_err(|e| Failure::io("stop the terminal from showing what is typed", &e))
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        imp::leave(&self.0);
    }
}

/// Rows and columns; 0 where they are not known.
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
        // A terminal that is gone needs nothing.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, saved);
    }

    pub(super) fn size() -> (u32, u32) {
        match tcgetwinsize(io::stdin()) {
            Ok(size) => (size.ws_row.into(), size.ws_col.into()),
            Err(_) => (0, 0),
        }
    }

    /// What the system tells us.
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

        /// Resolves with none when the terminal has another size, or with the signal that ends us.
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

    /// What the system tells us.
    pub(crate) struct Signals;

    impl Signals {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self)
        }

        /// Resolves when somebody presses Ctrl-C.
        pub(crate) async fn next(&mut self) -> Option<i32> {
            tokio::signal::ctrl_c().await.ok();
            Some(2)
        }
    }
}
