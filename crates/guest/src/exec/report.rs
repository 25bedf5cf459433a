//! Messages of a supervisor about its command, and their encoding in the pipe.

/// Step at which starting a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// `clone`.
    Fork,
    /// `setuid` and groups.
    User,
    /// `chdir`.
    Chdir,
    /// `execve`.
    Exec,
}

/// A report of a supervisor; see [`Report::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// The command has executed its program.
    Started,
    /// It could not be started.
    Failed {
        /// The step that failed.
        stage: Stage,
        /// Its errno.
        errno: i32,
    },
    /// It ended.
    Ended {
        /// The status of `waitpid`.
        status: i32,
        /// Time on the monotonic clock, in nanoseconds.
        at_ns: u64,
    },
    /// The foreground process group of its terminal; 0 when there is none.
    Foreground {
        /// Process group id.
        group: i32,
    },
}

// === impl Report ===

impl Report {
    /// Bytes of one report; below `PIPE_BUF`, so a report is written and read whole.
    pub(crate) const BYTES: usize = 24;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let (kind, a, b, ns) = match self {
            Self::Started => (1i32, 0i32, 0i32, 0u64),
            Self::Failed { stage, errno } => (2, stage as i32, errno, 0),
            Self::Ended { status, at_ns } => (3, status, 0, at_ns),
            Self::Foreground { group } => (4, group, 0, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[4..8].copy_from_slice(&a.to_ne_bytes());
        bytes[8..12].copy_from_slice(&b.to_ne_bytes());
        bytes[16..24].copy_from_slice(&ns.to_ne_bytes());
        bytes
    }

    /// Reads a report. None when it is not one: root in the sandbox can write what it likes into
    /// the supervisor's pipe.
    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let int = |at: usize| {
            i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let at_ns = u64::from_ne_bytes(*bytes[16..24].first_chunk()?);
        match (int(0), int(4), int(8)) {
            (1, _, _) => Some(Self::Started),
            (2, stage, errno) => {
                let stages = [Stage::Fork, Stage::User, Stage::Chdir, Stage::Exec];
                let stage = stages.into_iter().find(|known| *known as i32 == stage)?;
                Some(Self::Failed { stage, errno })
            }
            (3, status, _) => Some(Self::Ended { status, at_ns }),
            (4, group, _) => Some(Self::Foreground { group }),
            _ => None,
        }
    }
}
