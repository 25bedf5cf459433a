//! Fault injection under load: crashes, lost responses, conflicts and broken watches. At the end the state is exactly
//! the desired one.

use crate::child::Operator;
use crate::faults::Faults;
use crate::kinds::{connect, install_kinds};
use crate::load::{api, claim, make_pool, none_twice, observe, pool_is_full};
use k8e_kube_dev::{Cluster, Options};
use k8e_operator::crd::{Sandbox, SandboxClaim};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const REPLICAS: usize = 15;
/// Lifetime of one operator process.
const LIFE: Duration = Duration::from_secs(2);
/// Timeout until the state has converged.
const AT_MOST: Duration = Duration::from_secs(180);

fn duration() -> Duration {
    let seconds = std::env::var("K8E_CHAOS_SECONDS")
        .ok()
        .and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(16))
}

#[test]
fn the_state_converges_after_faults() {
    let options = Options {
        simulated_nodes: 4,
        ..Options::default()
    };
    let mut cluster = Cluster::up(options).expect("a cluster");
    let kubeconfig = cluster.kubeconfig();
    let runtime = Runtime::new().expect("a runtime");
    let (client, seen) = runtime.block_on(async {
        let client = connect(&kubeconfig).await;
        install_kinds(&client).await;
        make_pool(&client, REPLICAS).await;
        let seen = observe(&client);
        (client, seen)
    });
    let load = runtime.spawn(load(client.clone(), duration()));
    let (started, mut lives) = (Instant::now(), 0);
    while started.elapsed() < duration() {
        let operator = Operator::start(&kubeconfig, Faults::Storm);
        std::thread::sleep(LIFE);
        drop(operator); // kill -9
        lives += 1;
        if lives % 4 == 0 {
            cluster.stop_apiserver().expect("it stops");
            cluster.start_apiserver().expect("it starts again");
        }
    }
    let wanted = runtime.block_on(load).expect("the load ends");
    println!(
        "{lives} operators died; {} claims are to be served",
        wanted.len()
    );
    let _last = Operator::start(&kubeconfig, Faults::None);
    runtime.block_on(async {
        pool_is_full(&client, REPLICAS, AT_MOST).await;
        comes_to_rest(&client, &wanted).await;
    });
    none_twice(&seen);
}

/// Creates and deletes claims; returns those that are left at the end.
async fn load(client: Client, how_long: Duration) -> BTreeSet<String> {
    let claims = api::<SandboxClaim>(&client);
    let mut alive = BTreeSet::new();
    let started = Instant::now();
    for number in 0.. {
        if started.elapsed() >= how_long {
            break;
        }
        let name = format!("c{number:05}");
        let made = claims.create(&PostParams::default(), &claim(&name)).await;
        // The API server may be down; whether the claim was created is checked at the end.
        if made.is_ok() {
            alive.insert(name);
        }
        if number % 3 == 2
            && let Some(oldest) = alive.first().cloned()
            && claims
                .delete(&oldest, &DeleteParams::background())
                .await
                .is_ok()
        {
            alive.remove(&oldest);
        }
        if number % 7 == 6
            && let Ok(sandboxes) = api::<Sandbox>(&client)
                .list(&ListParams::default().limit(5))
                .await
            && let Some(victim) = sandboxes.items.first()
        {
            let _somebody_deletes_a_sandbox = api::<Sandbox>(&client)
                .delete(&victim.name_any(), &DeleteParams::background())
                .await;
        }
        tokio::time::sleep(Duration::from_millis(120)).await;
    }
    let left = claims
        .list(&ListParams::default())
        .await
        .expect("the API server is back");
    left.items.iter().map(ResourceExt::name_any).collect()
}

/// Each claim has a ready sandbox of its own, and there are no other sandboxes.
async fn comes_to_rest(client: &Client, wanted: &BTreeSet<String>) {
    let started = Instant::now();
    loop {
        match state(client, wanted).await {
            Ok(()) => return,
            Err(why) => assert!(started.elapsed() < AT_MOST, "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

async fn state(client: &Client, wanted: &BTreeSet<String>) -> Result<(), String> {
    let all = ListParams::default();
    let claims = api::<SandboxClaim>(client)
        .list(&all)
        .await
        .map_err(|e| e.to_string())?
        .items;
    let names: BTreeSet<_> = claims.iter().map(ResourceExt::name_any).collect();
    if &names != wanted {
        return Err(format!("claims {names:?} instead of {wanted:?}"));
    }
    let ready = |c: &&SandboxClaim| c.condition("Ready").is_some_and(|c| c.status == "True");
    let bound: BTreeSet<_> = claims
        .iter()
        .filter(ready)
        .filter_map(|c| c.bound_name().map(str::to_owned))
        .collect();
    if bound.len() != claims.len() {
        return Err(format!(
            "{} claims, {} sandboxes of theirs",
            claims.len(),
            bound.len()
        ));
    }
    let sandboxes = api::<Sandbox>(client)
        .list(&all)
        .await
        .map_err(|e| e.to_string())?
        .items;
    let existing: BTreeSet<_> = sandboxes.iter().map(ResourceExt::name_any).collect();
    if existing.len() != bound.len() + REPLICAS || !bound.is_subset(&existing) {
        return Err(format!(
            "{} sandboxes for {} claims and a pool of {REPLICAS}",
            existing.len(),
            bound.len()
        ));
    }
    let owned = |s: &Sandbox| {
        s.owner_references()
            .iter()
            .any(|o| claims.iter().any(|c| c.uid().as_ref() == Some(&o.uid)))
    };
    if sandboxes.iter().filter(|s| owned(s)).count() != claims.len() {
        return Err("a claim owns more than one sandbox".to_owned());
    }
    let pods = api::<Pod>(client)
        .list(&all)
        .await
        .map_err(|e| e.to_string())?
        .items;
    let pods: BTreeSet<_> = pods.iter().map(ResourceExt::name_any).collect();
    if pods == existing {
        Ok(())
    } else {
        Err(format!(
            "{} pods for {} sandboxes",
            pods.len(),
            existing.len()
        ))
    }
}
