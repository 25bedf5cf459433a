//! Upstreams that are slow, wrong or hostile, and endless CNAME chains.

use super::super::*;
use super::{QUICK, host, resolve, texts};
use crate::dns::test_upstream::{Act, Asked, Upstream, a, closed_port, cname, many};
use hickory_proto::op::{Message, MessageType, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use std::time::Instant as Clock;
use tokio::task::JoinSet;

/// Additional time on a busy machine.
const SLACK: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_cname_chain_is_limited() {
    let step = |n: usize| cname(&format!("h{n}.example"), 60, &format!("h{}.example", n + 1));
    let chain = |length: usize| {
        let mut records: Vec<_> = (0..length).map(step).collect();
        records.push(a(&format!("h{length}.example"), 60, "8.8.8.8"));
        records
    };
    let upstream = Upstream::with(chain(CHAIN_MAX)).await;
    let resolved = resolve(&upstream, "h0.example").await.unwrap();
    assert_eq!(resolved.names.len(), CHAIN_MAX);
    let upstream = Upstream::with(chain(CHAIN_MAX + 1)).await;
    let resolved = resolve(&upstream, "h0.example").await;
    assert_eq!(resolved, Err(ResolveError::BadAliasChain));
    // One CNAME per reply, without end.
    let upstream = Upstream::start(move |asked| {
        let number = asked.name.trim_matches(|c: char| !c.is_ascii_digit());
        vec![asked.records(vec![step(number.parse().unwrap())])]
    })
    .await;
    let resolved = resolve(&upstream, "h0.example").await;
    assert_eq!(resolved, Err(ResolveError::BadAliasChain));
    assert_eq!(upstream.asked().len(), CHAIN_MAX + 1);
}

#[tokio::test]
async fn cname_loops_and_invalid_targets_fail() {
    for target in [
        "a.example",
        "b.example",
        "a\\.b.example",
        "*.example",
        "1.2.3.4",
    ] {
        let records = vec![
            cname("a.example", 60, target),
            cname("b.example", 60, "a.example"),
            a("a.example", 60, "8.8.8.8"),
        ];
        let upstream = Upstream::with(records).await;
        let resolved = resolve(&upstream, "a.example").await;
        assert_eq!(resolved, Err(ResolveError::BadAliasChain), "{target}");
    }
}

#[tokio::test]
async fn truncated_oversized_and_malformed_tcp_replies_fail() {
    let bad: [fn(&Asked) -> Act; 4] = [
        |asked| asked.truncated(),
        |asked| asked.records(many("a.example", 1000)),
        |_| Act::Send(vec![1, 2, 3]),
        |_| Act::Send(vec![0; 100]),
    ];
    for act in bad {
        let upstream = Upstream::start(move |asked| match asked.tcp {
            false => vec![asked.truncated()],
            true => vec![act(asked)],
        })
        .await;
        assert_eq!(
            resolve(&upstream, "a.example").await,
            Err(ResolveError::Failed)
        );
    }
}

#[tokio::test]
async fn only_the_reply_to_the_query_is_accepted() {
    let upstream = Upstream::start(|asked| {
        let bad = |change: &dyn Fn(&mut Message)| {
            let mut reply = asked.reply();
            reply.add_answer(a("a.example", 60, "6.6.6.6"));
            change(&mut reply);
            reply.to_vec().unwrap()
        };
        let name = Name::from_ascii("b.example.").unwrap();
        let aaaa = RecordType::AAAA;
        vec![
            Act::Send(bad(&|reply| reply.metadata.id ^= 1)),
            Act::Send(bad(&|reply| reply.queries.clear())),
            Act::Send(bad(&|reply| {
                reply.queries[0].set_name(name.clone());
            })),
            Act::Send(bad(&|reply| {
                reply.queries[0].set_query_type(aaaa);
            })),
            Act::Send(bad(&|reply| {
                reply.metadata.message_type = MessageType::Query;
            })),
            Act::Send(b"garbage".to_vec()),
            Act::Send(Vec::new()),
            Act::SendFromElsewhere(bad(&|_| {})),
            asked.records(vec![a("a.example", 60, "8.8.8.8")]),
        ]
    })
    .await;
    let resolved = resolve(&upstream, "a.example").await.unwrap();
    assert_eq!(texts(&resolved).1, ["8.8.8.8"]);
    assert_eq!(upstream.asked().len(), 1);
}

#[tokio::test]
async fn spoofed_replies_cause_a_query_over_tcp() {
    let upstream = Upstream::start(|asked| {
        if asked.tcp {
            return vec![asked.records(vec![a("a.example", 60, "8.8.8.8")])];
        }
        let mut reply = asked.reply();
        reply.add_answer(a("a.example", 60, "6.6.6.6"));
        let guesses = (1..200).map(|guess| {
            reply.metadata.id = asked.message.id.wrapping_add(guess);
            Act::Send(reply.to_vec().unwrap())
        });
        guesses.collect()
    })
    .await;
    let resolved = resolve(&upstream, "a.example").await.unwrap();
    assert_eq!(texts(&resolved).1, ["8.8.8.8"]);
}

#[tokio::test]
async fn failover_to_the_next_upstream_which_stays_first() {
    let good = Upstream::with(vec![
        a("a.example", 60, "8.8.8.8"),
        a("b.example", 60, "8.8.8.8"),
    ])
    .await;
    let silent = Upstream::silent().await;
    let failing = Upstream::start(|asked| vec![asked.code(ResponseCode::ServFail)]).await;
    let refusing = Upstream::start(|asked| vec![asked.code(ResponseCode::Refused)]).await;
    let broken = Upstream::start(|asked| {
        let Act::Send(mut bytes) = asked.records(vec![a("a.example", 60, "8.8.8.8")]) else {
            unreachable!()
        };
        bytes.truncate(bytes.len() - 2);
        vec![Act::Send(bytes)]
    })
    .await;
    let closed = closed_port().await;
    for bad in [
        silent.address,
        failing.address,
        refusing.address,
        broken.address,
        closed,
    ] {
        let resolver = Resolver::with_timing(vec![bad, good.address], QUICK);
        let resolved = resolver.resolve(&host("a.example")).await.unwrap();
        assert_eq!(texts(&resolved).1, ["8.8.8.8"]);
        resolver.resolve(&host("b.example")).await.unwrap();
    }
    assert_eq!(silent.asked().len(), 1, "the good one is first now");
}

#[tokio::test]
async fn a_lost_query_is_retried() {
    let upstream = Upstream::start(|asked| match asked.number {
        0 | 1 => Vec::new(),
        _ => vec![asked.records(vec![a("a.example", 60, "8.8.8.8")])],
    })
    .await;
    assert!(resolve(&upstream, "a.example").await.is_ok());
    assert_eq!(upstream.asked().len(), 3);
}

#[tokio::test]
async fn unresponsive_upstreams_time_out() {
    let silent = [Upstream::silent().await, Upstream::silent().await];
    let resolver = Resolver::with_timing(silent.iter().map(|one| one.address).collect(), QUICK);
    let start = Clock::now();
    for _ in 0..3 {
        let resolved = resolver.resolve(&host("a.example")).await;
        assert_eq!(resolved, Err(ResolveError::Failed));
    }
    assert!(start.elapsed() < QUICK.whole + SLACK);
    assert_eq!(silent[0].asked().len() + silent[1].asked().len(), 3);
    let nobody = Resolver::new(Vec::new());
    assert_eq!(
        nobody.resolve(&host("a.example")).await,
        Err(ResolveError::Failed)
    );
}

#[tokio::test]
async fn a_slow_cname_chain_times_out() {
    let upstream = Upstream::start(|asked| {
        let target = format!("x{}", asked.name.trim_end_matches('.'));
        let records = vec![cname(asked.name.trim_end_matches('.'), 60, &target)];
        vec![
            Act::Wait(QUICK.once - Duration::from_millis(20)),
            asked.records(records),
        ]
    })
    .await;
    let start = Clock::now();
    assert_eq!(
        resolve(&upstream, "a.example").await,
        Err(ResolveError::Failed)
    );
    assert!(start.elapsed() < QUICK.whole + SLACK);
}

#[tokio::test]
async fn concurrent_lookups_are_limited() {
    let upstream = Upstream::silent().await;
    let timing = Timing {
        once: Duration::from_secs(9),
        whole: Duration::from_millis(500),
    };
    let resolver = Resolver::with_timing(vec![upstream.address], timing);
    let mut tasks = JoinSet::new();
    for number in 0..3 * LOOKUPS_MAX {
        let resolver = resolver.clone();
        let name = host(&format!("h{number}.example"));
        tasks.spawn(async move { resolver.resolve(&name).await });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(upstream.asked().len() <= LOOKUPS_MAX);
    assert_eq!(resolver.shared.lookups.available_permits(), 0);
    for resolved in tasks.join_all().await {
        assert_eq!(resolved, Err(ResolveError::Failed));
    }
    tokio::time::sleep(timing.whole + Duration::from_millis(200)).await;
    assert_eq!(resolver.shared.lookups.available_permits(), LOOKUPS_MAX);
}
