//! The kinds of isolation this server offers, the most wanted first.

use super::args::Config;
use super::error::Error;
use k8e_driver::{Driver, GvisorDriver, Machine, NativeDriver, Probe};
use std::sync::Arc;

/// Every driver of this machine. The engine gives the first that is installed to a session that asks for
/// none: a separate kernel comes before sharing the host's. All are started, also those that do not
/// work here (any more): they find and remove what an earlier server left.
pub(super) fn start(machine: &Machine, config: &Config) -> Result<Vec<Arc<dyn Driver>>, Error> {
    let gvisor = GvisorDriver::start(machine, config.gvisor_platform);
    let native = NativeDriver::start(machine);
    let mut drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(gvisor), Arc::new(native)];
    for driver in &drivers {
        match driver.probe() {
            Probe::Usable { .. } => {}
            Probe::Broken { reason } => tracing::warn!(
                "runtime {} is installed but does not work now, and is tried again: {reason}",
                driver.kind()
            ),
            Probe::Unusable { reason } if config.default_runtime == Some(driver.kind()) => {
                let kind = driver.kind();
                return Err(Error::DefaultRuntime { kind, reason });
            }
            Probe::Unusable { reason } => {
                tracing::info!("runtime {} is not offered: {reason}", driver.kind());
            }
        }
    }
    if let Some(kind) = config.default_runtime {
        let Some(at) = drivers.iter().position(|driver| driver.kind() == kind) else {
            let reason = "this k8e has none of that kind".to_owned();
            return Err(Error::DefaultRuntime { kind, reason });
        };
        let first = drivers.remove(at);
        drivers.insert(0, first);
    }
    Ok(drivers)
}
