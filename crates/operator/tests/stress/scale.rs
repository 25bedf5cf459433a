//! Scale: a pool with claims at a fixed rate, and thousands of idle sandboxes.

use crate::child::Operator;
use crate::faults::Faults;
use crate::kinds::{connect, install_kinds};
use crate::load::{self, api, claim, make_pool, none_twice, observe, pool_is_full};
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::crd::{Sandbox, SandboxClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

struct Size {
    pool: usize,
    claims: usize,
    rate: u32,
    sandboxes: usize,
}

fn size() -> Size {
    if std::env::var("K8E_SCALE").is_ok_and(|value| value == "full") {
        Size {
            pool: 500,
            claims: 500,
            rate: 50,
            sandboxes: 5000,
        }
    } else {
        Size {
            pool: 60,
            claims: 60,
            rate: 20,
            sandboxes: 150,
        }
    }
}

const AT_MOST: Duration = Duration::from_secs(900);

#[test]
fn claims_at_a_rate_and_thousands_of_sandboxes() {
    let size = size();
    let options = Options {
        simulated_nodes: 10,
        audit: true,
        ..Options::default()
    };
    let cluster = Cluster::up(options).expect("a cluster");
    let runtime = Runtime::new().expect("a runtime");
    let client = runtime.block_on(async {
        let client = connect(&cluster.kubeconfig()).await;
        install_kinds(&client).await;
        client
    });
    for args in [
        &["create", "serviceaccount", "operator"][..],
        &[
            "create",
            "clusterrolebinding",
            "operator",
            "--clusterrole=cluster-admin",
            "--serviceaccount=default:operator",
        ],
    ] {
        let made = cluster.kubectl().args(args).output().expect("kubectl runs");
        assert!(made.status.success(), "kubectl {args:?}");
    }
    let as_itself = cluster
        .service_account_kubeconfig("default", "operator")
        .expect("an account");
    let operator = Operator::start(&as_itself, Faults::None);
    operator.wait_ready();
    runtime.block_on(warm_claims(&client, &size));
    writes_per_claim(&cluster.dir().join("audit.log"), size.claims);
    drop(operator);
    runtime.block_on(at_rest(&client, &as_itself, &size));
}

async fn warm_claims(client: &Client, size: &Size) {
    let started = Instant::now();
    make_pool(client, size.pool).await;
    pool_is_full(client, size.pool, AT_MOST).await;
    println!(
        "a pool of {} is full after {:.1} s",
        size.pool,
        started.elapsed().as_secs_f64()
    );

    let seen = observe(client);
    let mut asked = BTreeMap::new();
    let mut clock = tokio::time::interval(Duration::from_secs(1) / size.rate);
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..size.claims {
        clock.tick().await;
        let name = format!("c{number:04}");
        asked.insert(name.clone(), Instant::now());
        let api = api::<SandboxClaim>(client);
        requests.spawn(async move {
            api.create(&PostParams::default(), &claim(&name))
                .await
                .expect("taken")
        });
    }
    requests.join_all().await;
    let started = Instant::now();
    while seen
        .lock()
        .expect("no code panics under this lock")
        .ready
        .len()
        < size.claims
    {
        assert!(started.elapsed() < AT_MOST, "not every claim is ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut latencies: Vec<Duration> = {
        let seen = seen.lock().expect("no code panics under this lock");
        asked
            .iter()
            .map(|(name, at)| seen.ready[name].duration_since(*at))
            .collect()
    };
    latencies.sort_unstable();
    let percentile = |p: usize| latencies[(latencies.len() - 1) * p / 100].as_secs_f64() * 1000.0;
    println!(
        "{} claims at {}/s, asked for to seen ready: p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms",
        size.claims,
        size.rate,
        percentile(50),
        percentile(90),
        percentile(99)
    );

    let claims = api::<SandboxClaim>(client)
        .list(&ListParams::default())
        .await
        .expect("a list")
        .items;
    let bound: BTreeSet<_> = claims
        .iter()
        .filter_map(|c| c.bound_name().map(str::to_owned))
        .collect();
    assert_eq!(bound.len(), size.claims, "each has its own");
    none_twice(&seen);
    pool_is_full(client, size.pool, AT_MOST).await;
    let sandboxes = api::<Sandbox>(client)
        .list(&ListParams::default())
        .await
        .expect("a list")
        .items;
    assert_eq!(
        sandboxes.len(),
        size.pool + size.claims,
        "no more than needed"
    );
    let warm = sandboxes.iter().filter(|s| {
        bound.contains(&s.name_any())
            && s.labels()
                .get("agents.x-k8s.io/launch-type")
                .is_some_and(|l| l == "warm")
    });
    println!(
        "{} of {} claims were warm; the pool was full again {:.1} s after the last claim",
        warm.count(),
        size.claims,
        started.elapsed().as_secs_f64()
    );
}

/// Counts the operator's own writes in the API server's audit log.
fn writes_per_claim(audit: &Path, claims: usize) {
    let log = std::fs::read_to_string(audit).expect("an audit log");
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for line in log.lines() {
        let Ok(event) = serde_json::from_str::<serde_json::Value>(line) else {
            continue;
        };
        let ours = event["user"]["username"] == "system:serviceaccount:default:operator";
        let verb = event["verb"].as_str().unwrap_or_default();
        let done = event["stage"] == "ResponseComplete"
            && event["responseStatus"]["code"]
                .as_u64()
                .is_some_and(|c| c < 300);
        if !(ours && done) || ["get", "list", "watch"].contains(&verb) {
            continue;
        }
        let reference = &event["objectRef"];
        let resource = reference["resource"].as_str().unwrap_or_default();
        let subresource = reference["subresource"]
            .as_str()
            .map(|s| format!("/{s}"))
            .unwrap_or_default();
        *counts
            .entry(format!("{verb} {resource}{subresource}"))
            .or_default() += 1;
    }
    println!("writes of the operator for {claims} claims and all sandboxes: {counts:#?}");
    let count = |what: &str| counts.get(what).copied().unwrap_or(0);
    // Two writes until a claim is ready: the owner of the sandbox, and the status of the claim.
    let path = count("patch sandboxes") + count("patch sandboxclaims/status");
    println!(
        "on the path of a claim: {:.2} writes",
        path as f64 / claims as f64
    );
    assert!(path <= 2 * claims, "{path} writes for {claims} claims");
}

async fn at_rest(client: &Client, kubeconfig: &Path, size: &Size) {
    let delete = DeleteParams::background();
    api::<k8e_operator::crd::SandboxWarmPool>(client)
        .delete(load::POOL, &delete)
        .await
        .expect("deleted");
    api::<SandboxClaim>(client)
        .delete_collection(&delete, &ListParams::default())
        .await
        .expect("deleted");
    let mut operator = Operator::start(kubeconfig, Faults::None);
    operator.wait_ready();
    settle(&operator, client, 0).await;
    println!(
        "memory with nothing to do: {} MB",
        operator.memory() / 1_000_000
    );

    let started = Instant::now();
    let mut requests = tokio::task::JoinSet::new();
    for number in 0..size.sandboxes {
        let sandbox: Sandbox = serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": format!("s{number:05}")},
            "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "none"}]}}},
        }))
        .expect("a sandbox");
        let api = api::<Sandbox>(client);
        requests.spawn(async move {
            api.create(&PostParams::default(), &sandbox)
                .await
                .expect("taken")
        });
        if requests.len() >= 16 {
            requests.join_next().await;
        }
    }
    requests.join_all().await;
    settle(&operator, client, size.sandboxes).await;
    let memory = operator.memory();
    println!(
        "{} sandboxes are ready after {:.0} s; memory of the operator: {} MB",
        size.sandboxes,
        started.elapsed().as_secs_f64(),
        memory / 1_000_000
    );
    assert!(memory <= 200_000_000);

    let mut lists = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let listed = api::<Sandbox>(client)
            .list(&ListParams::default())
            .await
            .expect("a list")
            .items;
        assert_eq!(listed.len(), size.sandboxes);
        lists.push(started.elapsed());
    }
    lists.sort_unstable();
    drop(operator);
    let started = Instant::now();
    operator = Operator::start(kubeconfig, Faults::None);
    operator.wait_ready();
    while operator.backlog() != Some(0.0) {
        assert!(
            started.elapsed() < AT_MOST,
            "the operator does not come to rest"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let restart = started.elapsed();
    let wrote: f64 = operator
        .counted("k8e_operator_writes_total")
        .iter()
        .map(|(_, n)| n)
        .sum::<f64>()
        .max(0.0);
    println!(
        "restart to rest: {restart:?}, {:.1} x one full list ({:?}); {wrote} writes; memory {} MB",
        restart.as_secs_f64() / lists[1].as_secs_f64(),
        lists[1],
        operator.memory() / 1_000_000
    );
    assert_eq!(wrote, 0.0, "nothing had changed");
    // Starting a process takes a tenth of a second regardless of the number of objects: with few, the ratio means
    // little.
    assert!(
        size.sandboxes < 1000 || restart <= lists[1] * 5,
        "{restart:?} for a list of {:?}",
        lists[1]
    );
}

/// Waits until there are exactly this many sandboxes, all ready, and the work queues are empty.
async fn settle(operator: &Operator, client: &Client, sandboxes: usize) {
    let started = Instant::now();
    loop {
        let all = api::<Sandbox>(client)
            .list(&ListParams::default())
            .await
            .expect("a list")
            .items;
        let ready = all
            .iter()
            .filter(|s| s.condition("Ready").is_some_and(|c| c.status == "True"))
            .count();
        if all.len() == sandboxes && ready == sandboxes && operator.backlog() == Some(0.0) {
            return;
        }
        assert!(
            started.elapsed() < AT_MOST,
            "{} sandboxes, {ready} ready",
            all.len()
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
