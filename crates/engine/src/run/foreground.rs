//! Registry of foreground runs: those whose caller waits for them. When the server stops it ends each: its
//! `run_ended` event is written, and a session that was made for it is destroyed, also when its caller
//! reads nothing any more and so nobody polls the run.

use crate::Error;
use crate::live::Live;
use crate::metrics::{self, RunEnd};
use crate::sessions::{Owned, Shared};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Foreground runs under way. How many there may be is bounded by runs for each session.
#[derive(Default)]
pub(crate) struct Foreground(Mutex<Registry>);

#[derive(Default)]
struct Registry {
    runs: HashMap<RunNumber, UnderWay>,
    last: RunNumber,
    /// The server stops: none is added.
    closed: bool,
}

/// Of a run, as long as this server lives.
pub(super) type RunNumber = u64;

/// A run that has begun and whose end is not recorded.
pub(super) struct UnderWay {
    live: Arc<Live>,
    /// A session for this run alone: goes with it.
    owned: Option<Owned>,
}

// === impl Foreground ===

impl Foreground {
    /// From here on its end is recorded: by who removes it, or by the server's stop.
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

    /// None when the server's stop was first.
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
    /// Ends all foreground runs, and begins none from now on. Their commands end with the connections to
    /// their guests.
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
