//! `k8e operator`: starts the informers, the admin server, leader election and the workers of the controllers.

use crate::assign::Assigner;
use crate::cache::Key;
use crate::caches::Caches;
use crate::context::{Context, Queues};
use crate::debounce::Debounce;
use crate::edge_detector::EdgeDetector;
use crate::error::{Class, Error, Result};
use crate::events::EventRecorder;
use crate::leader_election::LeaderElection;
use crate::options::{ControllerOptions, OperatorOptions};
use crate::timing::Timings;
use crate::work_queue::{Action, WorkQueue};
use crate::{claim, metrics, pool, sandbox, template};
use k8e_net::admin_http::{self, AdminHttp};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// Namespace of the lease when no flag sets it and the process does not run in a pod.
const NAMESPACE: &str = "agent-sandbox-system";
/// Timeout of releasing the lease at the end.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);
/// Workers that write claim annotations.
const ANNOTATION_WORKERS: usize = 4;

/// Runs the operator until `stop` resolves or leadership is lost.
///
/// # Errors
///
/// There is no cluster to connect to, an address cannot be bound, or leadership was lost.
pub async fn run(options: OperatorOptions, stop: impl Future<Output = ()>) -> Result<()> {
    let client = connect(&options).await?;
    run_with(client, options, stop).await
}

/// Runs the operator with an existing client; otherwise as [`run`].
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
    let (events, send_events) = EventRecorder::new(client.clone(), me.clone());
    tasks.spawn(send_events);
    let ctx = Arc::new(Context::new(
        client.clone(),
        options.controllers.clone().complete(),
        events,
    ));
    let synced = ctx.watch(&mut tasks);

    let ready = Arc::new(AtomicBool::new(false));
    tasks.spawn(admin_http::upkeep(metrics.clone()));
    if let Some(listener) = options.metrics_bind_address.listen("metrics").await? {
        let ctx = ctx.clone();
        let render = move || {
            ctx.measure();
            metrics.render()
        };
        tasks.spawn(AdminHttp::default().metrics(render).listen(listener));
    }
    if let Some(listener) = options.health_probe_bind_address.listen("probes").await? {
        let ready = ready.clone();
        let is_ready = move || {
            let synced = ready.load(Ordering::Relaxed).then_some(());
            std::future::ready(
                synced.ok_or_else(|| "initial cache sync is not complete".to_owned()),
            )
        };
        tasks.spawn(AdminHttp::default().probes(is_ready).listen(listener));
    }

    let namespace = options.leader_election_namespace.clone();
    let namespace = namespace
        .or_else(own_namespace)
        .unwrap_or_else(|| NAMESPACE.to_owned());
    let election = LeaderElection::new(client, &namespace, me);
    let work = async {
        synced.wait().await;
        ready.store(true, Ordering::Relaxed);
        tracing::info!("initial cache sync complete");
        if options.leader_elect {
            election.acquire().await;
            tracing::info!("acquired the lease: this process is the leader");
        }
        let mut workers = JoinSet::new();
        ctx.start(&mut workers);
        if options.leader_elect {
            election.keep().await
        } else {
            std::future::pending().await
        }
    };
    let outcome = tokio::select! {
        lost = work => Err(lost),
        () = stop => Ok(()),
    };
    if options.leader_elect && outcome.is_ok() {
        let _expires_otherwise = tokio::time::timeout(RELEASE_WITHIN, election.release()).await;
    }
    outcome
}

async fn connect(options: &OperatorOptions) -> Result<Client> {
    let no_cluster = |e: &dyn std::fmt::Display| {
        Error::Start(format!(
            "no Kubernetes cluster to connect to: {e}; set --kubeconfig FILE, or run in a pod with a service account"
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

/// Identity of the lease holder: the pod name, so that a restarted container keeps its lease, else host name and PID.
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

// === impl Context ===

impl Context {
    fn new(client: Client, options: ControllerOptions, events: EventRecorder) -> Self {
        Self {
            client,
            options,
            events,
            caches: Caches::default(),
            queues: Queues::default(),
            assigner: Assigner::default(),
            timings: Timings::default(),
            sandbox_status_debounce: Debounce::default(),
            pool_status_debounce: Debounce::default(),
            refill_throttle: Debounce::default(),
            refill_delay: Debounce::default(),
            pod_create_failing: EdgeDetector::default(),
            pool_create_failing: EdgeDetector::default(),
            pool_unschedulable: EdgeDetector::default(),
            pool_template_missing: EdgeDetector::default(),
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
        for _ in 0..ANNOTATION_WORKERS {
            workers.spawn(work(
                self.clone(),
                |w| &w.queues.annotations,
                "annotation",
                async |w, k| claim::annotate(w, k).await,
            ));
        }
    }
}

/// One worker: takes a key from the queue, reconciles it, repeats.
async fn work<F>(ctx: Arc<Context>, queue: fn(&Context) -> &WorkQueue, kind: &'static str, pass: F)
where
    F: AsyncFn(&Context, &Key) -> Result<Action>,
{
    loop {
        let key = queue(&ctx).take().await;
        let next = match pass(&ctx, &key).await {
            Ok(next) => next,
            Err(error) => after(&error, kind, &key),
        };
        queue(&ctx).done(&key, next);
    }
}

fn after(error: &Error, kind: &'static str, key: &Key) -> Action {
    match error.class() {
        Class::Conflict => {
            tracing::debug!(kind, %key, %error, "conflict: the object changed; reconciling again");
            Action::BackOff
        }
        Class::Gone => {
            tracing::debug!(kind, %key, %error, "an object is gone; reconciling again");
            Action::BackOff
        }
        Class::Throttled(wait) => Action::RequeueAfter(wait),
        Class::Permanent => {
            tracing::warn!(kind, %key, %error, "the API server rejects the object; waiting for a change of it");
            Action::AwaitChange
        }
        Class::Transient => {
            tracing::warn!(kind, %key, %error, "reconcile failed; retrying after a back-off");
            Action::BackOff
        }
    }
}
