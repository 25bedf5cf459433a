//! Rate limits, slow lookups and malformed queries.

use super::*;
use crate::dns::resolver::TTL_MIN;

fn burst(id: usize) -> Message {
    let name = format!("h{id}.example.");
    question(u16::try_from(id).unwrap(), &name, RecordType::A)
}

/// Number of replies until none arrives for a while.
async fn replies(served: &Served) -> usize {
    let mut buffer = [0; 4096];
    let mut count = 0;
    while timeout(Duration::from_millis(300), served.client.recv(&mut buffer))
        .await
        .is_ok()
    {
        count += 1;
    }
    count
}

/// Total count of a reason in the flow log.
async fn noted(served: &Served, reason: DenyReason) -> u64 {
    let flows = served.flows().await.into_iter();
    let these = flows.filter(|flow| flow.reason == Some(reason));
    these.map(|flow| flow.count).sum()
}

#[tokio::test]
async fn queries_have_a_rate_limit() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["none"], &[]).await;
    let mut follow = served.sandbox.flow_log().read(true);
    let start = std::time::Instant::now();
    for id in 0..2000 {
        served.send(&burst(id)).await;
        if id % 50 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let answered = replies(&served).await;
    let most = 201 + 50 * start.elapsed().as_millis() / 1000;
    assert!((200..=most).contains(&(answered as u128)), "{answered}");
    assert!(upstream.asked().is_empty());
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let dropped = noted(&served, DenyReason::RateLimited).await;
    assert!(dropped > 100, "{dropped}");
    let mut notes = 0;
    while let Ok(Some(flow)) = timeout(Duration::from_millis(1), follow.next()).await {
        notes += usize::from(flow.reason == Some(DenyReason::RateLimited));
    }
    assert!(notes < 10, "one a second, not one for each: {notes}");
    // After the refill queries are served again.
    assert_eq!(served.ask_a("a.example.").await, refused());
}

#[tokio::test]
async fn slow_lookups_are_limited() {
    let upstream = Upstream::silent().await;
    let served = Served::start(&upstream, &["*.example"], &[]).await;
    for id in 0..150 {
        served.send(&burst(id)).await;
        tokio::task::yield_now().await;
    }
    // Logged once a second, so in two entries: the first at once, the rest later.
    let all = async {
        while noted(&served, DenyReason::RateLimited).await < 150 - 64 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, all).await.unwrap();
    let mut names = upstream.names();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), crate::dns::query_limits::LOOKUPS_MAX);
    // Queries that need no upstream are still answered.
    assert_eq!(served.ask_a("other.test.").await, refused());
}

#[tokio::test]
async fn query_limits_are_per_sandbox() {
    let upstream = Upstream::with(vec![a("a.example", 60, "8.8.8.8")]).await;
    let loud = Served::start(&upstream, &["none"], &[]).await;
    let quiet = Served::start(&upstream, &["a.example"], &[]).await;
    for id in 0..1000 {
        loud.send(&burst(id)).await;
    }
    assert_eq!(quiet.ask_a("a.example.").await.0, ResponseCode::NoError);
}

#[tokio::test]
async fn malformed_queries_get_an_error_or_no_reply() {
    let upstream = Upstream::with(vec![a("a.example", 60, "8.8.8.8")]).await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let mut reply = question(7, "a.example.", RecordType::A).into_response();
    reply.metadata.recursion_available = true;
    for silent in [
        Vec::new(),
        vec![0; 11],
        vec![0xff; 4096],
        reply.to_vec().unwrap(),
    ] {
        served.client.send(&silent).await.unwrap();
    }
    assert_eq!(replies(&served).await, 0);
    for length in [12, 100, 513, 4097, 60_000] {
        let mut bytes = vec![0; length];
        bytes[1] = 9;
        served.client.send(&bytes).await.unwrap();
        let reply = served.receive().await;
        assert_eq!((reply.id, reply.response_code), (9, ResponseCode::FormErr));
    }
    assert_eq!(noted(&served, DenyReason::Malformed).await, 5);
    assert_eq!(served.ask_a("a.example.").await.0, ResponseCode::NoError);
}

#[tokio::test]
async fn several_queries_on_a_connection() {
    let upstream = Upstream::with(vec![a("a.example", 60, "8.8.8.8")]).await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let mut stream = TcpStream::connect(served.tcp).await.unwrap();
    for id in 0..20 {
        let reply = ask_tcp(&mut stream, &question(id, "a.example.", RecordType::A)).await;
        assert_eq!((reply.id, reply.answers.len()), (id, 1));
        let reply = ask_tcp(&mut stream, &question(id, "b.example.", RecordType::A)).await;
        assert_eq!(reply.response_code, ResponseCode::Refused);
    }
    // All queries in one stream, split at arbitrary positions.
    let message = framed(&question(5, "a.example.", RecordType::A));
    for piece in message.repeat(10).chunks(7) {
        stream.write_all(piece).await.unwrap();
    }
    for _ in 0..10 {
        let length = stream.read_u16().await.unwrap();
        let mut reply = vec![0; usize::from(length)];
        stream.read_exact(&mut reply).await.unwrap();
        assert_eq!(Message::from_vec(&reply).unwrap().id, 5);
    }
}

#[tokio::test]
async fn malformed_messages_close_the_connection() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    for bad in [&[0, 0][..], &[0, 11], &[0x10, 1], &[0xff, 0xff]] {
        let mut stream = TcpStream::connect(served.tcp).await.unwrap();
        stream.write_all(bad).await.unwrap();
        assert!(closes(&mut stream).await, "{bad:?}");
    }
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["a.example"], &[]).await;
    let mut idle = TcpStream::connect(served.tcp).await.unwrap();
    let mut slow = TcpStream::connect(served.tcp).await.unwrap();
    slow.write_all(&[0, 50, 1, 2, 3]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    tokio::time::pause();
    tokio::time::advance(2 * TTL_MIN).await;
    tokio::time::resume();
    assert!(closes(&mut idle).await && closes(&mut slow).await);
}

#[tokio::test]
async fn connections_are_limited() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["none"], &[]).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(served.tcp).await.unwrap();
        let reply = ask_tcp(&mut stream, &question(1, "a.example.", RecordType::A)).await;
        assert_eq!(reply.response_code, ResponseCode::Refused);
        open.push(stream);
    }
    let mut over = TcpStream::connect(served.tcp).await.unwrap();
    assert!(closes(&mut over).await);
    open.clear();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut again = TcpStream::connect(served.tcp).await.unwrap();
    let reply = ask_tcp(&mut again, &question(1, "a.example.", RecordType::A)).await;
    assert_eq!(reply.response_code, ResponseCode::Refused);
}

#[tokio::test]
async fn a_connection_over_the_rate_limit_is_closed() {
    let upstream = Upstream::with(vec![]).await;
    let served = Served::start(&upstream, &["none"], &[]).await;
    let mut stream = TcpStream::connect(served.tcp).await.unwrap();
    let message = framed(&question(5, "a.example.", RecordType::A));
    let _ = stream.write_all(&message.repeat(1000)).await;
    let mut replies = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut replies))
        .await
        .unwrap();
    assert!(replies.len() < 300 * message.len(), "{}", replies.len());
}
