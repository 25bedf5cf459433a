//! `k8e server`: takes the lock, binds the listening sockets and starts the launcher; drops root; starts store, engine and
//! gateway; then waits for a signal, drains, and exits.
//!
//! Sandboxes keep running after the server: the next one adopts them.

mod args;
mod control;
mod data_dir;
mod egress;
mod error;
mod lock;
mod process;
mod runtimes;
mod user;

pub(crate) use args::{LONG_ABOUT, ServerArgs};
pub(crate) use control::run as control;

use data_dir::DataDir;
use error::Error;
use k8e_cli::Globals;
use k8e_driver::{Driver, Machine, MachineConfig};
use k8e_engine::Sessions;
use k8e_gateway::{Admin, Gateway, Listeners, Metrics};
use k8e_model::EgressPolicy;
use k8e_net::shutdown;
use k8e_store::Store;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use user::ServerUser;

/// The guest binary (PID 1 of every sandbox); empty when this binary was built without it.
pub(crate) static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.bin"));

/// Graceful shutdown: longest wait for background tasks of the engine, then for the async runtime.
const SHUTDOWN_WITHIN: Duration = Duration::from_secs(10);
const RUNTIME_SHUTDOWN_WITHIN: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or SIGINT. An error is logged here, once.
pub(crate) fn run(globals: &Globals, args: ServerArgs) -> ExitCode {
    if let Err(error) = process::set_up(&args).and_then(|()| serve(globals, args)) {
        tracing::error!("{}", error.chain());
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn serve(globals: &Globals, args: ServerArgs) -> Result<(), Error> {
    process::check(GUEST)?;
    let autostarted = args.detached;
    let mut config = args.config(globals)?;
    if config.egress.allowed == EgressPolicy::All {
        tracing::warn!(
            "--allowed-hosts all: unless it is created with another list, a session can send data to any host"
        );
    }
    let data_dir = DataDir::prepare(&globals.data_dir)?;
    let lock = lock::take(&data_dir, &config.gateway.socket, autostarted)?;
    // Held until this process exits; the driver shares it with the launcher, which may live longer.
    let _lock = lock
        .try_clone()
        .map_err(|source| data_dir.failed("lock", source))?;
    let user = ServerUser::of(&data_dir);
    data_dir.give_to(&user)?;
    config.egress.find_upstreams();
    // Before everything else: only what is built after the recorder is measured.
    config.gateway.admin = match config.metrics_listen {
        Some(address) => {
            let metrics = Metrics::install().map_err(Error::Gateway)?;
            Some(Admin { address, metrics })
        }
        None => None,
    };
    let listeners = Listeners::bind(&config.gateway).map_err(Error::Gateway)?;

    let machine = Machine::start(MachineConfig {
        data_dir: data_dir.path().to_owned(),
        guest: GUEST.to_vec(),
        launcher: PathBuf::from("/proc/self/exe"),
        lock,
        memory_disks: config.memory_disks,
        disk_rate: config.disk_rate,
        runsc: config.runsc.clone(),
        limits_max: config.engine.limits_max,
        server_gid: user.gid,
        socket: Some(config.gateway.socket.clone()),
    })
    .map_err(Error::Driver)?;
    let drivers = runtimes::start(&machine, &config)?;
    config.engine.layers = Some(Arc::new(machine.clone()));
    // After the launcher: sandboxes must not inherit the raised limit.
    crate::descriptors::raise_limit();
    // From here on only the launcher is root. Before the async runtime, while there is one thread.
    user.become_it(&data_dir)?;

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Error::Runtime)?;
    let result = runtime.block_on(serve_until_signal(config, &data_dir, drivers, listeners));
    runtime.shutdown_timeout(RUNTIME_SHUTDOWN_WITHIN);
    if let Err(error) = machine.remove_socket() {
        tracing::warn!("{error}");
    }
    result
}

async fn serve_until_signal(
    mut config: args::Config,
    data_dir: &DataDir,
    drivers: Vec<Arc<dyn Driver>>,
    listeners: Listeners,
) -> Result<(), Error> {
    let signals = shutdown::signals().map_err(Error::Runtime)?;

    let store = Store::open(&data_dir.store()).await.map_err(Error::Store)?;
    config.engine.denied = config.egress.denied.clone();
    config.engine.gates = Some(Arc::new(config.egress.start()));
    let sessions = Sessions::start(config.engine, store, drivers)
        .await
        .map_err(Error::Engine)?;
    let socket = config.gateway.socket.clone();
    let gateway =
        Gateway::open(config.gateway, listeners, sessions.clone()).map_err(Error::Gateway)?;
    let tcp = gateway
        .tcp_address()
        .map(|address| format!(" and https://{address}"));
    if let Some(address) = gateway.admin_address() {
        tracing::info!("metrics: http://{address}/metrics");
    }
    if let Some(address) = gateway.expose_address() {
        tracing::info!("exposed services: http://{address}/k8e/expose/");
    }
    if let Some(address) = gateway.e2b_address() {
        tracing::info!("E2B API: http://{address}");
    }
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(
        "k8e {version} is ready on unix://{}{}",
        socket.display(),
        tcp.unwrap_or_default()
    );

    let stop = async {
        signals.await;
        tracing::info!("stopping: sandboxes keep running and are adopted by the next server");
    };
    let served = gateway.serve(stop).await.map_err(Error::Gateway);
    if tokio::time::timeout(SHUTDOWN_WITHIN, sessions.shutdown())
        .await
        .is_err()
    {
        tracing::warn!(
            "graceful shutdown: background tasks were still running after {SHUTDOWN_WITHIN:?} and are aborted"
        );
    }
    served
}
