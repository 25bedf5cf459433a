//! The drivers (runtimes) of this server, in the order in which they are preferred.

use super::args::Config;
use super::error::Error;
use k8e_driver::{Driver, GvisorDriver, Machine, NativeDriver, Probe};
use std::sync::Arc;

/// Starts every driver. The first installed one is the engine's default runtime: gVisor, with its separate kernel, comes
/// before native. Drivers that do not work here are started too: they find and remove sandboxes of an earlier server.
pub(super) fn start(machine: &Machine, config: &Config) -> Result<Vec<Arc<dyn Driver>>, Error> {
    let gvisor = GvisorDriver::start(machine, config.gvisor_platform);
    let native = NativeDriver::start(machine);
    let mut drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(gvisor), Arc::new(native)];
    for driver in &drivers {
        match driver.probe() {
            Probe::Usable { .. } => {}
            Probe::Broken { reason } => tracing::warn!(
                "runtime {} is installed but does not work now, and will be probed again: {reason}",
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
            let reason = "this version of k8e has no driver for it".to_owned();
            return Err(Error::DefaultRuntime { kind, reason });
        };
        let first = drivers.remove(at);
        drivers.insert(0, first);
    }
    Ok(drivers)
}
