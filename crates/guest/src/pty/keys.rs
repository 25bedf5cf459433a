//! Signal characters of termios (VINTR, VQUIT, VSUSP), for a kernel that sends the signal but also passes the
//! character to the program (gVisor): there the guest removes them from the input, and sends the signal itself.

use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr, tcgetpgrp};
use std::os::fd::AsFd;

/// The current signal characters of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    codes: [(u8, i32); 3],
    echo: bool,
}

/// A signal character in the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) at: usize,
    pub(super) signal: i32,
    /// Its echo, such as `^C`.
    pub(super) shown: Option<[u8; 2]>,
}

// === impl Keys ===

impl Keys {
    /// None where the kernel handles them, or ISIG is off.
    pub(super) fn of(master: impl AsFd) -> Option<Self> {
        // A kernel that has TIOCGPGRP for the master handles them correctly.
        if tcgetpgrp(&master).is_ok() {
            return None;
        }
        let modes = tcgetattr(&master).ok()?;
        let code = |index, signal| (modes.special_codes[index], signal);
        modes
            .local_modes
            .contains(LocalModes::ISIG)
            .then_some(Self {
                codes: [
                    code(SpecialCodeIndex::VINTR, libc::SIGINT),
                    code(SpecialCodeIndex::VQUIT, libc::SIGQUIT),
                    code(SpecialCodeIndex::VSUSP, libc::SIGTSTP),
                ],
                echo: modes.local_modes.contains(LocalModes::ECHO),
            })
    }

    pub(super) fn first(&self, typed: &[u8]) -> Option<Key> {
        typed.iter().enumerate().find_map(|(at, byte)| {
            // Zero (_POSIX_VDISABLE) means that there is no such character.
            let (code, signal) = self
                .codes
                .iter()
                .find(|(code, _)| code == byte && *code != 0)?;
            let shown = self.echo.then_some([b'^', code ^ 0x40]);
            Some(Key {
                at,
                signal: *signal,
                shown,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_key_of_what_is_typed() {
        let keys = Keys {
            codes: [(3, libc::SIGINT), (28, libc::SIGQUIT), (0, libc::SIGTSTP)],
            echo: true,
        };
        assert_eq!(keys.first(b"plain\0text\n"), None);
        let key = keys.first(b"ab\x1c\x03").unwrap();
        assert_eq!((key.at, key.signal), (2, libc::SIGQUIT));
        assert_eq!(key.shown, Some(*b"^\\"));
        assert_eq!(keys.first(b"\x03").unwrap().shown, Some(*b"^C"));
    }
}
