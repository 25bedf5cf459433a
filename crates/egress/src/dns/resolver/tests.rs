//! The resolver against upstreams on loopback.

mod hostile;

use super::*;
use crate::dns::test_upstream::{Act, Upstream, a, cname, many};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use tokio::task::JoinSet;

/// Short timeouts that still hold on a busy machine.
const QUICK: Timing = Timing {
    once: Duration::from_millis(400),
    whole: Duration::from_millis(1500),
};

fn host(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn texts(resolved: &Resolved) -> (Vec<&str>, Vec<String>) {
    let names = resolved.names.iter().map(HostName::as_str).collect();
    let addresses = resolved.addresses.iter().map(Ipv4Addr::to_string).collect();
    (names, addresses)
}

async fn resolve(upstream: &Upstream, name: &str) -> Result<Resolved, ResolveError> {
    let resolver = Resolver::with_timing(vec![upstream.address], QUICK);
    resolver.resolve(&host(name)).await
}

#[tokio::test]
async fn only_records_of_the_queried_name_are_used() {
    let upstream = Upstream::with(vec![
        a("example.com", 60, "8.8.8.8"),
        a("other.example", 60, "8.8.4.4"),
        a("example.com", 60, "1.1.1.1"),
        a("example.com", 60, "8.8.8.8"),
    ])
    .await;
    let resolved = resolve(&upstream, "Example.COM").await.unwrap();
    assert_eq!(texts(&resolved).1, ["8.8.8.8", "1.1.1.1"]);
    let asked = upstream.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].name, "example.com.");
    let message = &asked[0].message;
    assert_eq!(message.queries[0].query_type(), RecordType::A);
    assert!(message.edns.is_none() && message.additionals.is_empty());
}

#[tokio::test]
async fn cnames_of_one_reply_in_any_order() {
    let upstream = Upstream::with(vec![
        a("c.example", 7, "8.8.8.8"),
        cname("b.example", 60, "C.example"),
        cname("a.example", 30, "b.example"),
    ])
    .await;
    let resolved = resolve(&upstream, "a.example").await.unwrap();
    assert_eq!(texts(&resolved).0, ["b.example", "c.example"]);
    assert_eq!(resolved.ttl, Duration::from_secs(7));
}

#[tokio::test]
async fn a_cname_without_its_address_is_queried() {
    let upstream = Upstream::start(|asked| {
        vec![asked.records(match asked.name.as_str() {
            "a.example." => vec![cname("a.example", 9, "b.example")],
            "b.example." => vec![cname("b.example", 60, "c.example")],
            _ => vec![a("c.example", 60, "8.8.8.8")],
        })]
    })
    .await;
    let resolved = resolve(&upstream, "a.example").await.unwrap();
    assert_eq!(texts(&resolved).0, ["b.example", "c.example"]);
    assert_eq!(resolved.ttl, Duration::from_secs(9));
    assert_eq!(upstream.names(), ["a.example.", "b.example.", "c.example."]);
}

#[tokio::test]
async fn no_name_and_no_address() {
    let upstream = Upstream::start(|asked| vec![asked.code(ResponseCode::NXDomain)]).await;
    let resolver = Resolver::with_timing(vec![upstream.address], QUICK);
    for _ in 0..3 {
        let resolved = resolver.resolve(&host("a.example")).await;
        assert_eq!(resolved, Err(ResolveError::NoName));
    }
    assert_eq!(upstream.asked().len(), 1);
    let upstream = Upstream::with(vec![a("other.example", 60, "8.8.8.8")]).await;
    let resolved = resolve(&upstream, "a.example").await;
    assert_eq!(resolved, Err(ResolveError::NoAddress));
}

#[tokio::test]
async fn a_truncated_reply_is_queried_over_tcp() {
    let upstream = Upstream::start(|asked| match asked.tcp {
        false => vec![asked.truncated()],
        true => vec![asked.records(many("a.example", 500))],
    })
    .await;
    let resolved = resolve(&upstream, "a.example").await.unwrap();
    assert_eq!(resolved.addresses.len(), reply::ADDRESSES_MAX);
    assert_eq!(resolved.addresses[0], Ipv4Addr::new(8, 8, 0, 0));
    let asked = upstream.asked();
    assert_eq!([asked[0].tcp, asked[1].tcp], [false, true]);
    assert_ne!(asked[0].message.id, asked[1].message.id);
}

#[tokio::test]
async fn ids_and_source_ports_are_random() {
    let upstream = Upstream::with(vec![]).await;
    let resolver = Resolver::with_timing(vec![upstream.address], QUICK);
    for number in 0..20 {
        let name = host(&format!("h{number}.example"));
        assert_eq!(resolver.resolve(&name).await, Err(ResolveError::NoAddress));
    }
    let mut ports: Vec<u16> = upstream
        .asked()
        .iter()
        .map(|asked| asked.from.port())
        .collect();
    ports.sort_unstable();
    ports.dedup();
    assert!(ports.len() > 15, "{ports:?}");
    let mut ids: Vec<u16> = upstream
        .asked()
        .iter()
        .map(|asked| asked.message.id)
        .collect();
    let in_order = ids
        .windows(2)
        .filter(|pair| pair[1].wrapping_sub(pair[0]) == 1);
    assert!(in_order.count() < 5);
    ids.sort_unstable();
    ids.dedup();
    assert!(ids.len() > 15, "{ids:?}");
}

#[tokio::test]
async fn ttls_are_clamped() {
    for (said, kept) in [
        (0, TTL_MIN),
        (4, TTL_MIN),
        (6, Duration::from_secs(6)),
        (86_400, TTL_MAX),
        (u32::MAX, TTL_MAX),
    ] {
        let upstream = Upstream::with(vec![a("a.example", said, "8.8.8.8")]).await;
        let resolved = resolve(&upstream, "a.example").await.unwrap();
        assert_eq!(resolved.ttl, kept, "{said}");
    }
}

#[tokio::test]
async fn a_cached_name_is_not_queried_until_it_expires() {
    let upstream = Upstream::start(|asked| {
        let address = format!("8.8.8.{}", asked.number);
        vec![asked.records(vec![a("a.example", 0, &address)])]
    })
    .await;
    let resolver = Resolver::new(vec![upstream.address]);
    let name = host("a.example");
    let first = resolver.resolve(&name).await.unwrap();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3)).await;
    let again = resolver.resolve(&name).await.unwrap();
    assert_eq!(again.addresses, first.addresses);
    assert!(again.ttl <= Duration::from_secs(2), "what is left of it");
    tokio::time::advance(Duration::from_secs(2)).await;
    tokio::time::resume();
    let fresh = resolver.resolve(&name).await.unwrap();
    assert_eq!(texts(&fresh).1, ["8.8.8.1"]);
}

#[tokio::test]
async fn concurrent_lookups_of_a_name_share_one_query() {
    let upstream = Upstream::start(|asked| {
        let records = vec![a("a.example", 60, "8.8.8.8")];
        vec![Act::Wait(Duration::from_millis(50)), asked.records(records)]
    })
    .await;
    let resolver = Resolver::with_timing(vec![upstream.address], QUICK);
    // A dropped waiter does not cancel the lookup of the others.
    let gone = timeout(
        Duration::from_millis(10),
        resolver.resolve(&host("a.example")),
    )
    .await;
    assert!(gone.is_err());
    let mut tasks = JoinSet::new();
    for _ in 0..200 {
        let resolver = resolver.clone();
        tasks.spawn(async move { resolver.resolve(&host("a.example")).await });
    }
    for resolved in tasks.join_all().await {
        assert_eq!(resolved.unwrap().addresses, [Ipv4Addr::new(8, 8, 8, 8)]);
    }
    assert_eq!(upstream.asked().len(), 1);
}
