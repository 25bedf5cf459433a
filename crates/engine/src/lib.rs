//! The session service: every door calls [`Sessions`], and nothing else talks to drivers, guests or the store.
//!
//! Live sessions are held in memory behind a short-held lock, so that a command starts without
//! waiting for the disk; the store has the state for crash recovery, written before a sandbox is made
//! and after it is gone, so that a crash at any point leaves nothing that recovery cannot find.

mod access_tokens;
mod approvals;
mod audit;
mod background;
mod commands;
mod config;
mod error;
mod exposures;
mod files;
mod gate;
mod guest;
mod history;
mod interpreter;
mod keys;
mod live;
pub mod metrics;
mod pool;
mod processes;
mod recorder;
mod run;
mod secrets;
mod sessions;
mod snapshots;
mod templates;
mod terminals;
mod usage;
mod watch;

/// For the crate `fuzz`: the decoder of a kernel's streams.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::interpreter::fuzzing::*;
}

pub use approvals::ApprovalFilter;
pub use audit::Audit;
pub use background::{BackgroundStarted, RunWatch, RunWatchEvent};
pub use commands::{
    CommandConfig, CommandEvent, CommandExit, CommandInput, CommandStart, CommandStream,
    CommandView,
};
pub use config::Config;
pub use error::Error;
pub use exposures::{EXPOSE_PATH, ExposeBase, ExposedService, OpenPort, PortConnection};
pub use files::{
    FileInfo, FileKind, FileLister, FileOwner, FileRange, FileReader, FileWriter, ListOptions,
    WriteOptions,
};
pub use gate::Denied;
pub use interpreter::{
    ContextChoice, ContextSpec, ContextView, Execute, Execution, ExecutionEvent,
};
pub use k8e_model::{RunRequest, RunTarget};
pub use k8e_store::{
    AuditQuery, AuditRow, Event, EventPage, SavedSnapshot, SecretEntry, SnapshotEntry,
    TemplateRecord, TranscriptPage,
};
pub use keys::{Certificate, KeyView, NewKey};
pub use pool::PoolStatus;
pub use processes::Process;
pub use run::{Run, RunEvent, RunInput};
pub use secrets::SecretOwner;
pub use sessions::{
    FlowStream, ForkMemory, ForkedSession, ForkedSessions, ListFilter, RuntimeStatus, ServerStatus,
    SessionView, Sessions,
};
pub use snapshots::{ExportStream, Saved};
pub use templates::{LayerUpload, NewTemplate, TemplateOrigin, TemplateProgress, TemplateView};
pub use terminals::{
    Foreground, TerminalEvent, TerminalExit, TerminalRequest, TerminalStream, TerminalView,
};
pub use usage::SessionMetrics;
pub use watch::{FileChange, FileEvent, FileWatch};
