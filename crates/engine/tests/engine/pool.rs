//! Warm pools: claim, refill, back-off, drain.

use super::*;
use k8e_engine::PoolStatus;
use k8e_model::{Limits, PoolSize, SandboxId};
use std::collections::HashSet;

const MIB: u64 = 1024 * 1024;

fn pooled(min: usize, max: usize) -> Config {
    Config {
        pool: PoolSize::new(min, max).unwrap(),
        ..Config::default()
    }
}

impl Server {
    async fn pooled(min: usize, max: usize) -> Self {
        Self::with(pooled(min, max), FakeDriver::new()).await
    }

    fn pool(&self) -> PoolStatus {
        self.sessions.pools().remove(0)
    }

    async fn pool_until(&self, what: &str, is: impl Fn(&PoolStatus) -> bool) -> PoolStatus {
        let wait = async {
            loop {
                let pool = self.pool();
                if is(&pool) {
                    return pool;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        match tokio::time::timeout(PATIENCE, wait).await {
            Ok(pool) => pool,
            Err(_) => panic!("{what}: {:?}", self.pool()),
        }
    }

    /// Waits until that many are ready and no launch is pending.
    async fn ready(&self, count: usize) {
        self.pool_until(&format!("{count} are ready"), |pool| {
            pool.ready == count && pool.pending == 0
        })
        .await;
    }

    async fn start_of(&self, id: &str) -> String {
        let page = self.sessions.events(&me(), &sid(id), 0, 10).await.unwrap();
        let created = &page.events[0];
        assert_eq!(created.kind, "created");
        let detail: serde_json::Value = serde_json::from_str(&created.detail).unwrap();
        detail["start"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn a_claim_is_a_hit_and_applies_the_limits() {
    let server = Server::pooled(2, 4).await;
    server.ready(2).await;
    let warm = server.driver.sandboxes();
    let limits = Limits {
        memory_bytes: 64 * MIB,
        cpu_millis: 250,
        pids: 33,
        ..Limits::default()
    };
    let asked = SessionSpec {
        limits: limits.into(),
        env: [("KEY".to_owned(), "value".to_owned())]
            .into_iter()
            .collect::<std::collections::BTreeMap<_, _>>()
            .try_into()
            .unwrap(),
        ..spec("mine")
    };
    let view = server.sessions.create(&me(), asked).await.unwrap();
    assert_eq!(view.session.phase, Phase::Active);
    assert!(warm.contains(&view.session.sandbox));
    assert_eq!(server.driver.limits(&view.session.sandbox), limits);
    let ran = server.run("mine", "echo $KEY").await.unwrap();
    assert_eq!(ran.0, b"value\n");
    assert_eq!(server.start_of("mine").await, "warm");
    // The record is that of a session that can be used: there was no moment between.
    let record = server.store.session(&sid("mine")).await.unwrap().unwrap();
    assert_eq!(record.phase, Phase::Active);
    assert_eq!(record.sandbox, view.session.sandbox);
    assert_eq!(record.limits, limits);

    // The pool is full again, of others, with the server's own limits.
    server.ready(2).await;
    let pool = server.pool();
    assert_eq!((pool.hits, pool.misses), (1, 0));
    assert!(pool.claim_p50_us > 0 && pool.claim_p50_us <= pool.claim_p99_us);
    let other = server.create("other").await;
    assert_ne!(other.session.sandbox, view.session.sandbox);
    assert_eq!(
        server.driver.limits(&other.session.sandbox),
        Limits::default()
    );
}

#[tokio::test]
async fn a_sandbox_serves_one_session_only() {
    let server = Server::pooled(1, 1).await;
    let mut seen = HashSet::new();
    for _ in 0..5 {
        server.ready(1).await;
        let view = server.create("again").await;
        assert!(seen.insert(view.session.sandbox.clone()));
        server.sessions.destroy(&me(), &sid("again")).await.unwrap();
        assert!(!server.driver.sandboxes().contains(&view.session.sandbox));
    }
    assert_eq!(server.pool().hits, 5);
}

#[tokio::test]
async fn a_dead_one_is_never_claimed() {
    let server = Server::pooled(3, 3).await;
    for _ in 0..10 {
        server.ready(3).await;
        let dead = server.driver.sandboxes()[0].clone();
        server.driver.kill(&dead);
        // At once: its watcher had no time to run.
        let view = server.create("lives").await;
        assert_ne!(view.session.sandbox, dead);
        assert!(server.run("lives", "true").await.is_ok());
        server.sessions.destroy(&me(), &sid("lives")).await.unwrap();
        let gone = async {
            while server.driver.sandboxes().contains(&dead) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone)
            .await
            .expect("what is left of a dead one goes");
        // Skip the back-off after a death: this test is about claims.
        server
            .pool_until("is filled again", |pool| pool.ready == 3)
            .await;
        if server.pool().hits >= 3 {
            break;
        }
    }
    assert_eq!(server.pool().misses, 0);
}

#[tokio::test]
async fn when_all_are_dead_a_new_one_is_made() {
    let server = Server::pooled(2, 2).await;
    server.ready(2).await;
    for dead in server.driver.sandboxes() {
        server.driver.kill(&dead);
    }
    server.create("cold").await;
    assert_eq!(server.start_of("cold").await, "cold");
    assert!(server.run("cold", "true").await.is_ok());
    assert_eq!(server.pool().misses, 1);
}

#[tokio::test]
async fn one_whose_limits_cannot_be_set_is_discarded() {
    let server = Server::pooled(2, 2).await;
    server.ready(2).await;
    let warm = server.driver.sandboxes();
    server.driver.fail_set_limits(true);
    let asked = SessionSpec {
        limits: Limits {
            pids: 77,
            ..Limits::default()
        }
        .into(),
        ..spec("cold")
    };
    let view = server.sessions.create(&me(), asked).await.unwrap();
    assert!(!warm.contains(&view.session.sandbox));
    assert_eq!(server.driver.limits(&view.session.sandbox).pids, 77);
    server.ready(2).await;
    let left = server.driver.sandboxes();
    assert!(warm.iter().all(|id| !left.contains(id)));
}

#[tokio::test]
async fn another_disk_limit_is_unfit_for_a_warm_sandbox() {
    let server = Server::pooled(1, 4).await;
    server.ready(1).await;
    let asked = SessionSpec {
        limits: Limits {
            disk_bytes: 64 * MIB,
            ..Limits::default()
        }
        .into(),
        ..spec("cold")
    };
    let view = server.sessions.create(&me(), asked).await.unwrap();
    assert_eq!(server.start_of("cold").await, "cold");
    assert_eq!(
        server.driver.limits(&view.session.sandbox).disk_bytes,
        64 * MIB
    );
    let pool = server.pool();
    assert_eq!((pool.hits, pool.misses, pool.unfit), (0, 0, 1));
    assert_eq!(pool.ready, 1);
    assert_eq!(pool.target, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_claims_never_get_the_same_one() {
    const CLAIMS: usize = 500;
    let config = Config {
        sessions_max: CLAIMS,
        ..pooled(40, 40)
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.ready(40).await;
    let claims = (0..CLAIMS).map(|i| {
        let sessions = server.sessions.clone();
        tokio::spawn(async move { sessions.create(&me(), spec(&format!("s-{i}"))).await })
    });
    let mut seen: HashSet<SandboxId> = HashSet::new();
    for claim in claims.collect::<Vec<_>>() {
        let view = claim.await.unwrap().unwrap();
        assert!(seen.insert(view.session.sandbox), "handed out twice");
    }
    let pool = server.pool();
    assert_eq!(pool.hits + pool.misses, CLAIMS as u64);
    assert!(pool.hits >= 40, "{pool:?}");
    server.sessions.shutdown().await;
    // What is left is what sessions have.
    let left: HashSet<_> = server.driver.sandboxes().into_iter().collect();
    assert_eq!(left, seen);
}

#[tokio::test]
async fn a_pool_grows_with_demand() {
    let server = Server::pooled(1, 6).await;
    server.ready(1).await;
    for i in 0..12 {
        server.create(&format!("s-{i}")).await;
    }
    server.ready(6).await;
    assert_eq!(server.pool().target, 6);
}

#[tokio::test]
async fn a_refused_request_uses_up_no_warm_sandbox() {
    let config = Config {
        sessions_max: 1,
        ..pooled(2, 2)
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.ready(2).await;
    server.create("only").await;
    server.ready(2).await;
    let launched = server.driver.launched();
    for _ in 0..20 {
        refused(
            server.sessions.create(&me(), spec("more")).await,
            Code::Exhausted,
            "sessions are alive",
        );
        refused(
            server.sessions.create(&me(), spec("only")).await,
            Code::Exists,
            "exists already",
        );
    }
    assert_eq!(server.driver.launched(), launched);
    assert_eq!(server.pool().ready, 2);
}

/// The id is taken in the store only, by another owner's ended session.
#[tokio::test]
async fn a_failed_claim_leaves_nothing() {
    let server = Server::pooled(1, 1).await;
    server.ready(1).await;
    server.create("taken").await;
    server.sessions.destroy(&me(), &sid("taken")).await.unwrap();
    server.ready(1).await;
    refused(
        server.sessions.create(&other(), spec("taken")).await,
        Code::Exists,
        "exists already",
    );
    server.ready(1).await;
    assert_eq!(server.driver.sandboxes().len(), 1);
}

#[tokio::test]
async fn failed_launches_are_retried_with_exponential_back_off() {
    let driver = FakeDriver::new();
    driver.fail_launches(usize::MAX);
    let begun = std::time::Instant::now();
    let server = Server::with(pooled(1, 1), driver).await;
    let pool = server
        .pool_until("fails", |pool| !pool.failure.is_empty())
        .await;
    assert!(pool.failure.contains("on fire"), "{pool:?}");
    tokio::time::sleep(Duration::from_millis(900)).await;
    // At 0, 100, 300, 700, 1500 ms and so on, however long we slept.
    let tried = server.driver.launches_tried();
    let so_far = begun.elapsed();
    let most = (0..).take_while(|n| Duration::from_millis(100 * ((1 << n) - 1)) <= so_far);
    assert!(
        (2..=most.count()).contains(&tried),
        "{tried} launches in {so_far:?}"
    );
    // A creation meanwhile gets the error, and does not change the back-off.
    refused(
        server.sessions.create(&me(), spec("now")).await,
        Code::Unsupported,
        "on fire",
    );
    server.driver.fail_launches(0);
    server.ready(1).await;
    assert_eq!(server.pool().failure, "");
}

#[tokio::test]
async fn one_whose_guest_is_silent_is_not_ready() {
    let script: k8e_testkit::Script = Arc::new(|_| Some(Vec::new()));
    let server = Server::with(pooled(1, 1), FakeDriver::scripted(script)).await;
    let pool = server
        .pool_until("fails", |pool| !pool.failure.is_empty())
        .await;
    assert_eq!(pool.ready, 0);
    assert!(pool.failure.contains("did not answer"), "{pool:?}");
    server.driver.set_script(None);
    server.ready(1).await;
    assert_eq!(server.driver.sandboxes().len(), 1);
}

#[tokio::test]
async fn shutdown_drains_the_pool_and_leaves_sessions() {
    let server = Server::pooled(3, 3).await;
    server.ready(3).await;
    let kept = server.create("kept").await.session.sandbox;
    // Also pending launches.
    server.driver.set_launch_delay(Duration::from_millis(100));
    server.create("another").await;
    server
        .sessions
        .destroy(&me(), &sid("another"))
        .await
        .unwrap();
    server.pool_until("launches", |pool| pool.pending > 0).await;
    server.sessions.shutdown().await;
    assert_eq!(server.driver.sandboxes(), [kept]);
    let server = server.start_again().await;
    server.ready(3).await;
    assert!(server.run("kept", "true").await.is_ok());
    assert_eq!(server.driver.sandboxes().len(), 4);
}

/// As after kill -9: the pool was not drained.
#[tokio::test]
async fn warm_sandboxes_are_swept_after_a_crash() {
    let server = Server::pooled(3, 3).await;
    server.ready(3).await;
    let kept = server.create("kept").await.session.sandbox;
    server.ready(3).await;
    let old: HashSet<_> = server.driver.sandboxes().into_iter().collect();
    let server = server.start_again().await;
    server.ready(3).await;
    let new: HashSet<_> = server.driver.sandboxes().into_iter().collect();
    assert_eq!(new.len(), 4);
    assert_eq!(old.intersection(&new).collect::<Vec<_>>(), [&kept]);
    assert!(server.run("kept", "true").await.is_ok());
    // Those of the running server live.
    server.create("warm").await;
    assert_eq!(server.start_of("warm").await, "warm");
}

#[tokio::test]
async fn without_a_pool_sessions_start_cold() {
    let server = Server::start().await;
    assert!(server.sessions.pools().is_empty());
    server.create("cold").await;
    assert_eq!(server.start_of("cold").await, "cold");
    assert_eq!(server.driver.launched(), 1);
}
