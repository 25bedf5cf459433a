//! `k8e operator`: the watches, the controllers and the lease, put together.

use crate::assign::Assigner;
use crate::cache::Key;
use crate::error::{Class, Error, Result};
use crate::events::NoteBook;
use crate::gathering::{Gathering, Known};
use crate::leader::Leadership;
use crate::options::{ControllerOptions, OperatorOptions};
use crate::queue::{Next, Queue};
use crate::side_door;
use crate::timing::Timings;
use crate::world::{Holdings, Queues, World};
use crate::{claim, metrics, pool, sandbox, template};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// Namespace of the lease where none is given and none is ours.
const NAMESPACE: &str = "agent-sandbox-system";
/// How long giving up the lease may take.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);
/// Workers that write what may come late.
const NOTE_WORKERS: usize = 4;

/// Runs the operator until `stop` is done, or until it can no longer lead.
///
/// # Errors
///
/// The cluster cannot be found, an address cannot be bound, or leadership was lost.
pub async fn run(options: OperatorOptions, stop: impl Future<Output = ()>) -> Result<()> {
    let client = connect(&options).await?;
    run_with(client, options, stop).await
}

/// The same with a client that is there already.
///
/// # Errors
///
/// An address cannot be bound, or leadership was lost.
pub async fn run_with(
    client: Client,
    options: OperatorOptions,
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let metrics = metrics::install()?;
    let me = identity();
    let mut tasks = JoinSet::new();
    let (notes, send_notes) = NoteBook::open(client.clone(), me.clone());
    tasks.spawn(send_notes);
    let world = Arc::new(World::new(
        client.clone(),
        options.controllers.clone().complete(),
        notes,
    ));
    let synced = world.watch(&mut tasks);

    let ready = Arc::new(AtomicBool::new(false));
    tasks.spawn(side_door::upkeep(metrics.clone()));
    if let Some(listener) = options.metrics_bind_address.listen("metrics").await? {
        let world = world.clone();
        let answer = side_door::metrics(metrics, move || world.measure());
        tasks.spawn(side_door::serve(listener, answer));
    }
    if let Some(listener) = options.health_probe_bind_address.listen("probes").await? {
        let ready = ready.clone();
        let is_ready = move || match ready.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err("the first lists are not complete"),
        };
        tasks.spawn(side_door::serve(listener, side_door::probes(is_ready)));
    }

    let namespace = options.leader_election_namespace.clone();
    let namespace = namespace
        .or_else(own_namespace)
        .unwrap_or_else(|| NAMESPACE.to_owned());
    let leadership = Leadership::new(client, &namespace, me);
    let work = async {
        synced.wait().await;
        ready.store(true, Ordering::Relaxed);
        tracing::info!("everything is known");
        if options.leader_elect {
            leadership.acquire().await;
            tracing::info!("this process leads");
        }
        let mut workers = JoinSet::new();
        world.start(&mut workers);
        if options.leader_elect {
            leadership.keep().await
        } else {
            std::future::pending().await
        }
    };
    let outcome = tokio::select! {
        lost = work => Err(lost),
        () = stop => Ok(()),
    };
    if options.leader_elect && outcome.is_ok() {
        let _another_takes_it_later =
            tokio::time::timeout(RELEASE_WITHIN, leadership.release()).await;
    }
    outcome
}

async fn connect(options: &OperatorOptions) -> Result<Client> {
    let no_cluster = |e: &dyn std::fmt::Display| {
        Error::Start(format!(
            "no cluster: {e}; give --kubeconfig FILE, or run it in a pod with a service account"
        ))
    };
    let config = match &options.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file).map_err(|e| no_cluster(&e))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .map_err(|e| no_cluster(&e))?
        }
        None => Config::infer().await.map_err(|e| no_cluster(&e))?,
    };
    Client::try_from(config).map_err(|e| no_cluster(&e))
}

/// A pod that restarts keeps its name and its lease; elsewhere every process is somebody else.
fn identity() -> String {
    match std::env::var("POD_NAME") {
        Ok(pod) if !pod.is_empty() => pod,
        _ => {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            format!("{}_{}", host.trim(), std::process::id())
        }
    }
}

fn own_namespace() -> Option<String> {
    let file = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
    let namespace = std::fs::read_to_string(file).ok()?;
    Some(namespace.trim().to_owned()).filter(|n| !n.is_empty())
}

// === impl World ===

impl World {
    fn new(client: Client, options: ControllerOptions, notes: NoteBook) -> Self {
        Self {
            client,
            options,
            notes,
            held: Holdings::default(),
            queues: Queues::default(),
            assigner: Assigner::default(),
            timings: Timings::default(),
            gathering: Gathering::default(),
            pool_figures: Gathering::default(),
            refills: Gathering::default(),
            delays: Gathering::default(),
            failing: Known::default(),
            pool_failing: Known::default(),
            held_up: Known::default(),
            no_template: Known::default(),
            measured: std::sync::Mutex::default(),
        }
    }

    fn start(self: &Arc<Self>, workers: &mut JoinSet<()>) {
        let options = &self.options;
        for _ in 0..options.sandbox_concurrent_workers {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.sandboxes,
                "sandbox",
                async |w, k| sandbox::reconcile(w, k).await,
            ));
        }
        if !options.extensions {
            return;
        }
        for _ in 0..options.sandbox_claim_concurrent_workers {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.claims,
                "claim",
                async |w, k| claim::reconcile(w, k).await,
            ));
        }
        for _ in 0..options.sandbox_warm_pool_concurrent_workers {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.pools,
                "pool",
                async |w, k| pool::reconcile(w, k).await,
            ));
        }
        for _ in 0..options.sandbox_template_concurrent_workers {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.templates,
                "template",
                async |w, k| template::reconcile(w, k).await,
            ));
        }
        for _ in 0..NOTE_WORKERS {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.notes,
                "note",
                async |w, k| claim::annotate(w, k).await,
            ));
        }
    }
}

/// One worker: a key, a pass over it, the next key.
async fn work<F>(world: Arc<World>, queue: fn(&World) -> &Queue, kind: &'static str, pass: F)
where
    F: AsyncFn(&World, &Key) -> Result<Next>,
{
    loop {
        let key = queue(&world).take().await;
        let next = match pass(&world, &key).await {
            Ok(next) => next,
            Err(error) => after(&error, kind, &key),
        };
        queue(&world).done(&key, next);
    }
}

fn after(error: &Error, kind: &'static str, key: &Key) -> Next {
    match error.class() {
        Class::Conflict => {
            tracing::debug!(kind, %key, %error, "somebody was faster");
            Next::Retry
        }
        Class::Gone => {
            tracing::debug!(kind, %key, %error, "gone");
            Next::Retry
        }
        Class::Throttled(wait) => Next::After(wait),
        Class::Permanent => {
            tracing::warn!(kind, %key, %error, "this cannot work until somebody changes it");
            Next::Wait
        }
        Class::Transient => {
            tracing::warn!(kind, %key, %error, "a pass failed; it is tried again");
            Next::Retry
        }
    }
}
