//! `k8e server`: lock, launcher, listening sockets; give up root; store, engine, doors; then wait for a
//! signal, drain, and leave.
//!
//! Sandboxes outlive the server: the next one finds them again.

mod args;
mod data_dir;
mod egress;
mod error;
mod lock;
mod process;
mod runtimes;
mod user;

pub(crate) use args::{LONG_ABOUT, ServerArgs};

use data_dir::DataDir;
use error::Error;
use k8e_cli::Globals;
use k8e_driver::{Driver, Machine, MachineConfig};
use k8e_engine::Sessions;
use k8e_gateway::{Admin, Gateway, Listeners, Metrics};
use k8e_model::EgressPolicy;
use k8e_store::Store;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use user::ServerUser;

/// The agent inside every sandbox; empty when it was not built.
pub(crate) static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.bin"));

/// Background tasks that do not end by themselves are left behind then.
const SHUTDOWN_WITHIN: Duration = Duration::from_secs(10);
const RUNTIME_SHUTDOWN_WITHIN: Duration = Duration::from_secs(2);

/// Serves until a signal. Everything that goes wrong is said here, once.
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
            "--allowed-hosts all: a session that does not say can send what it reads anywhere"
        );
    }
    let data_dir = DataDir::prepare(&globals.data_dir)?;
    let lock = lock::take(&data_dir, &config.gateway.socket, autostarted)?;
    // Kept for as long as we live; the driver shares it with the launcher, which may live longer.
    let _lock = lock
        .try_clone()
        .map_err(|source| data_dir.failed("lock", source))?;
    let user = ServerUser::of(&data_dir);
    data_dir.give_to(&user)?;
    config.egress.find_upstreams();
    // First: who is built after it is measured.
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
        limits_max: config.engine.limits_max,
        server_gid: user.gid,
        socket: Some(config.gateway.socket.clone()),
    })
    .map_err(Error::Driver)?;
    let drivers = runtimes::start(&machine, &config)?;
    // After the launcher: sandboxes shall not have our number of descriptors.
    crate::descriptors::raise_limit();
    // From here on nothing is root but the launcher. Before the runtime: there is one thread yet.
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
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Runtime)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Runtime)?;

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
        tracing::info!("metrics are on http://{address}/metrics");
    }
    if let Some(address) = gateway.expose_address() {
        tracing::info!("exposed services are on http://{address}/k8e/expose/");
    }
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(
        "k8e {version} is ready on unix://{}{}",
        socket.display(),
        tcp.unwrap_or_default()
    );

    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: sandboxes stay alive for the next server");
    };
    let served = gateway.serve(stop).await.map_err(Error::Gateway);
    if tokio::time::timeout(SHUTDOWN_WITHIN, sessions.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("background work was still under way after {SHUTDOWN_WITHIN:?}");
    }
    served
}
