//! Metrics of a session: counters of the driver, and the disk as a guest reports it.

use super::*;
use k8e_model::ResourceUsage;
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{DiskUse, reply, request};

/// A server whose guest reports this disk.
async fn server(disk: DiskUse) -> Server {
    let script: Script = Arc::new(move |call| match call {
        request::Call::StatDisk(asked) => {
            assert_eq!(asked.path, "/workspace");
            Some(vec![Step::Reply(reply::Reply::DiskUse(disk))])
        }
        _ => None,
    });
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    server
}

#[tokio::test]
async fn metrics_are_those_of_the_counters_and_the_disk() {
    let disk = DiskUse {
        total_bytes: 1000,
        used_bytes: 400,
    };
    let server = server(disk).await;
    let sessions = &server.sessions;
    let unknown = sessions.session_metrics(&me(), &sid("a")).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unsupported);

    let view = sessions.get(&me(), &sid("a")).await.unwrap();
    let (sandbox, limits) = (&view.session.sandbox, view.session.limits);
    let usage = |cpu| ResourceUsage {
        cpu_time: Some(cpu),
        memory_bytes: 7000,
        cache_bytes: 300,
    };
    server
        .driver
        .set_usage(sandbox, usage(Duration::from_secs(5)));
    let later = async {
        // Within the measurement.
        tokio::time::sleep(Duration::from_millis(50)).await;
        server
            .driver
            .set_usage(sandbox, usage(Duration::from_secs(6)));
    };
    let (who, id) = (me(), sid("a"));
    let (metrics, ()) = tokio::join!(sessions.session_metrics(&who, &id), later);
    let metrics = metrics.unwrap();
    assert_eq!(metrics.cpu_time, Duration::from_secs(6));
    assert_eq!(metrics.cpu_millis, limits.cpu_millis);
    assert!(metrics.cpu_used_percent > 0.0, "{metrics:?}");
    assert_eq!(
        (metrics.memory_used_bytes, metrics.memory_cache_bytes),
        (7000, 300)
    );
    assert_eq!(metrics.memory_total_bytes, limits.memory_bytes);
    assert_eq!(
        (metrics.disk_used_bytes, metrics.disk_total_bytes),
        (400, 1000)
    );
    let stranger = Principal::token_holder("somebody else");
    let refused = sessions.session_metrics(&stranger, &sid("a")).await;
    assert!(matches!(refused, Err(Error::SessionNotFound(_))));
    sessions.pause(&me(), &sid("a")).await.unwrap();
    let paused = sessions.session_metrics(&me(), &sid("a")).await;
    assert!(matches!(paused, Err(Error::SessionPaused(_))));
}

#[tokio::test]
async fn a_guest_cannot_report_a_larger_disk_than_it_has() {
    let disk = DiskUse {
        total_bytes: u64::MAX,
        used_bytes: u64::MAX,
    };
    let server = server(disk).await;
    let sessions = &server.sessions;
    let view = sessions.get(&me(), &sid("a")).await.unwrap();
    let (sandbox, limits) = (&view.session.sandbox, view.session.limits);
    server.driver.set_usage(sandbox, ResourceUsage::default());
    let metrics = sessions.session_metrics(&me(), &sid("a")).await.unwrap();
    assert_eq!(metrics.disk_total_bytes, limits.disk_bytes);
    assert_eq!(metrics.disk_used_bytes, limits.disk_bytes);
}
