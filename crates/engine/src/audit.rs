//! Audit log: one row for every operation that changes something, whichever API it came through.
//!
//! An [`Audit`] is created when the operation begins and ended with its result. A dropped one is
//! recorded as `cancelled`: the caller disconnected before the result. Rows are written by the
//! write-behind recorder.

use crate::recorder::{Recorder, now_ms};
use crate::{Error, Sessions};
use k8e_model::{KeyId, Principal};
use k8e_store::{AuditQuery, AuditRow};

/// Bytes of an object's name; longer ones are cut, as paths in a workspace may be long.
const OBJECT_BYTES_MAX: usize = 512;

/// Audit row of an operation in progress.
pub struct Audit {
    recorder: Recorder,
    principal: String,
    key: String,
    source: String,
    action: &'static str,
    object: String,
    ended: bool,
}

// === impl Sessions ===

impl Sessions {
    /// Begins a row. Public for operations that an API implements itself; the engine's own do this already.
    pub fn audited(&self, who: &Principal, action: &'static str, object: &str) -> Audit {
        Audit::begin(&self.shared.recorder, who, action, object)
    }

    /// Rows of the audit log, the oldest first. Requires administrator rights.
    pub async fn audit(&self, who: &Principal, query: &AuditQuery) -> Result<Vec<AuditRow>, Error> {
        self.administrator(who, "the audit is shown")?;
        self.shared.recorder.flush().await;
        Ok(self.shared.store.audit(query).await?)
    }

    /// Authorization check: `who` must be an administrator. `what` names the operation in the error.
    pub(crate) fn administrator(&self, who: &Principal, what: &'static str) -> Result<(), Error> {
        if who.is_administrator() {
            return Ok(());
        }
        Err(Error::NotAdministrator(what))
    }
}

// === impl Audit ===

impl Audit {
    pub(crate) fn begin(
        recorder: &Recorder,
        who: &Principal,
        action: &'static str,
        object: &str,
    ) -> Self {
        Self {
            recorder: recorder.clone(),
            principal: who.name().to_owned(),
            key: who.key().map(KeyId::to_string).unwrap_or_default(),
            source: who.source().to_owned(),
            action,
            object: object[..object.floor_char_boundary(OBJECT_BYTES_MAX)].to_owned(),
            ended: false,
        }
    }

    /// Sets the object, when it was not known at the beginning.
    pub fn about(&mut self, object: &str) {
        self.object = object[..object.floor_char_boundary(OBJECT_BYTES_MAX)].to_owned();
    }

    /// Writes the row with the result's code; returns the result.
    pub fn end<T>(mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.write(result.as_ref().map_or_else(|e| e.code().as_str(), |_| "ok"));
        result
    }

    /// Writes the row with an error before the operation ends.
    pub(crate) fn failed(&mut self, error: &Error) {
        self.write(error.code().as_str());
    }

    /// Writes the row with a status code, for callers without a `Result` of the engine.
    pub fn end_with(mut self, code: Result<(), k8e_model::Code>) {
        self.write(code.map_or_else(k8e_model::Code::as_str, |()| "ok"));
    }

    fn write(&mut self, code: &str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.recorder.audit(AuditRow {
            at: now_ms(),
            principal: std::mem::take(&mut self.principal),
            key: std::mem::take(&mut self.key),
            source: std::mem::take(&mut self.source),
            action: self.action.to_owned(),
            object: std::mem::take(&mut self.object),
            code: code.to_owned(),
        });
    }
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit")
            .field("action", &self.action)
            .field("object", &self.object)
            .finish_non_exhaustive()
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.write("cancelled");
    }
}
