//! Runtime selection. A session that asks for none gets the first runtime that is installed here, in the
//! operator's order, and no other: one that is installed but does not work makes creations fail, because the
//! next in order isolates less. It is probed again in the background.

use super::Shared;
use crate::Error;
use k8e_driver::{Driver, Probe};
use k8e_model::RuntimeKind;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Probe interval of broken runtimes: a probe costs as much as a launch.
const PROBE_AGAIN_EVERY: Duration = Duration::from_secs(30);

/// Probes broken runtimes until shutdown.
pub(super) async fn probe_again(shared: Arc<Shared>) {
    loop {
        tokio::select! {
            () = shared.stopped() => return,
            () = sleep(PROBE_AGAIN_EVERY) => {}
        }
        for at in 0..shared.drivers.len() {
            if shared.is_broken(at) {
                probe_one(&shared, at).await;
            }
        }
    }
}

async fn probe_one(shared: &Shared, at: usize) {
    let Some(driver) = shared.drivers.get(at).cloned() else {
        return;
    };
    let kind = driver.kind();
    let Ok(probe) = tokio::task::spawn_blocking(move || driver.probe()).await else {
        return;
    };
    if let Probe::Usable { .. } = probe {
        tracing::info!("runtime {kind} works again");
    }
    shared.set_probe(at, probe);
}

// === impl Shared ===

impl Shared {
    /// Probes every driver, except broken ones, which are probed in the background.
    pub(super) fn probe_all(&self) -> Vec<(RuntimeKind, Probe)> {
        for (at, driver) in self.drivers.iter().enumerate() {
            if !self.is_broken(at) {
                self.set_probe(at, driver.probe());
            }
        }
        self.probed()
    }

    fn is_broken(&self, at: usize) -> bool {
        matches!(self.probes().get(at), Some(Probe::Broken { .. }))
    }

    fn set_probe(&self, at: usize, probe: Probe) {
        if let Some(last) = self.probes().get_mut(at) {
            *last = probe;
        }
    }

    /// The runtime of a session that asks for none; none when no runtime is installed.
    pub(super) fn default_runtime(&self) -> Option<RuntimeKind> {
        let probes = self.probes();
        let mut candidates = self.drivers.iter().zip(probes.iter());
        let installed = candidates.find(|(_, probe)| !matches!(probe, Probe::Unusable { .. }));
        installed.map(|(driver, _)| driver.kind())
    }

    /// Whether sandboxes of this kind can be made here.
    pub(super) fn works(&self, kind: RuntimeKind) -> bool {
        let probes = self.probes();
        let mut candidates = self.drivers.iter().zip(probes.iter());
        candidates
            .any(|(driver, probe)| driver.kind() == kind && matches!(probe, Probe::Usable { .. }))
    }

    /// The driver that was asked for, or the default one.
    pub(super) fn choose(&self, asked: Option<RuntimeKind>) -> Result<Arc<dyn Driver>, Error> {
        let kind = asked
            .or_else(|| self.default_runtime())
            .ok_or_else(no_runtime)?;
        let probes = self.probes();
        let mut candidates = self.drivers.iter().zip(probes.iter());
        match candidates.find(|(driver, _)| driver.kind() == kind) {
            Some((driver, Probe::Usable { .. })) => Ok(Arc::clone(driver)),
            Some((_, Probe::Broken { reason })) => Err(Error::RuntimeBroken {
                kind,
                reason: reason.clone(),
                others: self.others(&probes),
            }),
            Some((_, Probe::Unusable { reason })) => Err(Error::Runtime(format!(
                "runtime {kind} does not work on this machine: {reason}"
            ))),
            None => {
                let what_to_do = match self.others(&probes) {
                    others if others.is_empty() => {
                        "and no other works on this machine, as `k8e check-config` shows".to_owned()
                    }
                    others => format!("choose one of: {others}"),
                };
                Err(Error::Runtime(format!(
                    "runtime {kind} is not available in this version of k8e: {what_to_do}"
                )))
            }
        }
    }

    /// Runtimes that work, for people.
    fn others(&self, probes: &[Probe]) -> String {
        let usable = |(_, probe): &(_, &Probe)| matches!(probe, Probe::Usable { .. });
        let usable = self.drivers.iter().zip(probes).filter(usable);
        let names: Vec<_> = usable.map(|(driver, _)| driver.kind().as_str()).collect();
        names.join(", ")
    }
}

/// Error when no runtime is installed.
fn no_runtime() -> Error {
    Error::Runtime(
        "no runtime works on this machine: `k8e check-config` says what each one lacks".to_owned(),
    )
}
