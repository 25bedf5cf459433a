//! Coming back after a stop or a crash: what lives is adopted, what died is recorded, the rest is swept away.

use super::Shared;
use super::create::HELLO_TIMEOUT;
use crate::Error;
use crate::error::chain;
use crate::live::Live;
use crate::recorder::now_ms;
use futures::StreamExt as _;
use k8e_driver::Sandbox;
use k8e_model::{Phase, SandboxId, Session};
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;
use tokio::time::timeout;

/// Sandboxes that are greeted at once: a few that hang must not hold up the others.
const ADOPTED_AT_ONCE: usize = 16;

// === impl Shared ===

impl Shared {
    /// Makes the index and the machine what the records say, and the records what is true.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<(), Error> {
        let records = self.store.unended_sessions().await?;
        let found = futures::stream::iter(records)
            .map(|record| self.recover_one(record))
            .buffer_unordered(ADOPTED_AT_ONCE);
        let results: Vec<Result<Option<SandboxId>, Error>> = found.collect().await;
        let keep: HashSet<SandboxId> = results
            .into_iter()
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        for driver in &self.drivers {
            match driver.sweep(&keep).await {
                Ok(swept) if swept.is_empty() => {}
                Ok(swept) => {
                    tracing::info!(runtime = %driver.kind(), sandboxes = swept.len(), "removed leftovers")
                }
                Err(e) => {
                    tracing::warn!(runtime = %driver.kind(), error = chain(&e), "leftovers cannot be removed")
                }
            }
        }
        Ok(())
    }

    /// The sandbox to keep, when its session goes on.
    async fn recover_one(self: &Arc<Self>, record: Session) -> Result<Option<SandboxId>, Error> {
        let (id, sandbox_id) = (record.id.clone(), record.sandbox.clone());
        match self.try_adopt(&record).await {
            Ok(sandbox) => {
                let live = Arc::new(Live::new(record));
                live.set_sandbox(sandbox);
                self.index().sessions.insert(id.clone(), Arc::clone(&live));
                self.recorder.event(&id, "recovered", json!({}));
                self.publish(&live);
                Ok(Some(sandbox_id))
            }
            Err(reason) => {
                self.store
                    .set_phase(&id, Phase::Ended, &reason, now_ms())
                    .await?;
                self.recorder
                    .event(&id, "ended", json!({ "reason": reason }));
                Ok(None)
            }
        }
    }

    /// Its sandbox, or why its session is over.
    async fn try_adopt(&self, record: &Session) -> Result<Arc<dyn Sandbox>, String> {
        match record.phase {
            Phase::Creating => return Err("the server stopped while it was being made".to_owned()),
            Phase::Terminating | Phase::Ended => {
                return Err("the server stopped while it was being removed".to_owned());
            }
            Phase::Active => {}
        }
        let Some(driver) = self.driver(record.runtime) else {
            return Err(format!(
                "the server came back without its runtime {}",
                record.runtime
            ));
        };
        let sandbox: Arc<dyn Sandbox> = match driver.adopt(&record.sandbox).await {
            Ok(Some(sandbox)) => sandbox.into(),
            Ok(None) => return Err("the sandbox was gone when the server came back".to_owned()),
            Err(e) => {
                return Err(format!(
                    "the sandbox could not be taken over when the server came back: {}",
                    chain(&e)
                ));
            }
        };
        match timeout(HELLO_TIMEOUT, sandbox.guest().hello()).await {
            Ok(Ok(())) => Ok(sandbox),
            Ok(Err(_)) | Err(_) => {
                // The sweep would do it too; here the failure can be told apart.
                if let Err(e) = sandbox.destroy().await {
                    tracing::warn!(sandbox = %record.sandbox, error = chain(&e), "a sandbox without an agent cannot be removed");
                }
                Err("its agent did not answer when the server came back".to_owned())
            }
        }
    }
}
