//! Registry of foreground runs: those whose caller waits for them. Shutdown ends each: its
//! `run_ended` event is written, and a session that was created for it is destroyed, also when its caller
//! does not read any more and so the run is not polled.

use crate::Error;
use crate::live::Live;
use crate::metrics::{self, RunEnd};
use crate::sessions::{Owned, Shared};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Foreground runs in progress, bounded by the limits on sessions and on runs per session.
#[derive(Default)]
pub(crate) struct Foreground(Mutex<Registry>);

#[derive(Default)]
struct Registry {
    runs: HashMap<RunNumber, UnderWay>,
    last: RunNumber,
    /// Set at shutdown: no run is added.
    closed: bool,
}

/// Number of a foreground run, unique until the server restarts.
pub(super) type RunNumber = u64;

/// A run that has started and whose end is not recorded.
pub(super) struct UnderWay {
    live: Arc<Live>,
    /// Session created for this run alone: destroyed with it.
    owned: Option<Owned>,
}

// === impl Foreground ===

impl Foreground {
    /// Registers a run. Its end is recorded by the caller of `remove`, or by shutdown.
    pub(super) fn add(&self, live: Arc<Live>, owned: Option<Owned>) -> Result<RunNumber, Error> {
        let mut registry = self.registry();
        if registry.closed {
            return Err(Error::Stopping);
        }
        registry.last += 1;
        let number = registry.last;
        registry.runs.insert(number, UnderWay { live, owned });
        Ok(number)
    }

    /// Unregisters a run; none when shutdown has recorded its end already.
    pub(super) fn remove(&self, number: RunNumber) -> Option<UnderWay> {
        self.registry().runs.remove(&number)
    }

    fn close(&self) -> Vec<UnderWay> {
        let mut registry = self.registry();
        registry.closed = true;
        registry.runs.drain().map(|(_, run)| run).collect()
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Shared ===

impl Shared {
    /// Ends all foreground runs and refuses new ones. Closing the connections to their guests kills
    /// the commands.
    pub(crate) fn stop_foreground_runs(&self) {
        for run in self.foreground.close() {
            metrics::run_ended(run.live.record.runtime, RunEnd::Cancelled);
            self.recorder
                .event(&run.live.record, "run_ended", ended_by_stop());
            drop(run.owned);
        }
    }
}

fn ended_by_stop() -> Value {
    json!({ "status": "cancelled", "error": Error::Stopping.to_string() })
}
