//! Keys that are signals, for a kernel that sends the signal but lets the program read the key as well (gVisor): there
//! they are taken out of what is typed, and we send the signal.

use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr, tcgetpgrp};
use std::os::fd::AsFd;

/// What the keys of a terminal mean now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    codes: [(u8, i32); 3],
    echo: bool,
}

/// One of them, in what is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) at: usize,
    pub(super) signal: i32,
    /// What the terminal shows for it.
    pub(super) shown: Option<[u8; 2]>,
}

// === impl Keys ===

impl Keys {
    /// None where they are the kernel's to look after, or are no signals now.
    pub(super) fn of(master: impl AsFd) -> Option<Self> {
        // Whose kernel tells about groups here gets this right.
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
            // Zero is how a terminal says that there is no such key.
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
