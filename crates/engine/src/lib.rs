//! The session service: every door calls [`Sessions`], and nothing else talks to drivers, guests or the store.
//!
//! Live sessions are held in memory behind a short-held lock, so that a command starts without
//! waiting for the disk; the store has what survives a restart, written before a sandbox is made
//! and after it is gone, so that a crash at any point leaves nothing that recovery cannot find.

mod approvals;
mod audit;
mod config;
mod error;
mod exposures;
mod files;
mod gate;
mod guest;
mod history;
mod keys;
mod live;
pub mod metrics;
mod pool;
mod processes;
mod recorder;
mod run;
mod runs;
mod secrets;
mod sessions;
mod snapshots;
mod terminals;

pub use approvals::ApprovalFilter;
pub use audit::Audit;
pub use config::Config;
pub use error::Error;
pub use exposures::{EXPOSE_PATH, ExposeBase, ExposedService, OpenPort, PortConnection};
pub use files::{
    FileInfo, FileKind, FileLister, FileRange, FileReader, FileWriter, ListOptions, WriteOptions,
};
pub use gate::Denied;
pub use k8e_store::{
    AuditQuery, AuditRow, Event, EventPage, SecretEntry, SnapshotEntry, TranscriptPage,
};
pub use keys::{Certificate, KeyView, NewKey};
pub use pool::PoolStatus;
pub use processes::Process;
pub use run::{Run, RunEvent, RunInput, RunRequest, RunTarget};
pub use runs::{BackgroundStarted, RunWatch, RunWatchEvent};
pub use secrets::SecretOwner;
pub use sessions::{FlowStream, ListFilter, RuntimeStatus, ServerStatus, SessionView, Sessions};
pub use terminals::{
    Foreground, TerminalEvent, TerminalExit, TerminalRequest, TerminalStream, TerminalView,
};
