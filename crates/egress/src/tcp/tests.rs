//! Proxied connections over real sockets on loopback.

use super::relay;
use super::testing::*;
use crate::fd_budget::Budget;
use crate::sandbox_net::Limits;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

mod cuts;
mod retry;
mod tls;

/// Original destinations, by port.
const TLS: &str = "93.184.215.14:443";
const SSH: &str = "93.184.215.14:22";
const ADDRESS: &str = "93.184.215.14";

async fn denied(allow: &[&str], deny: &[&str], to: &str, told: &[&str], said: &[u8]) -> String {
    let stage = Stage::open(policy(allow, deny), to, nobody().await).await;
    for host in told {
        stage.tell(host, ADDRESS);
    }
    let said = stage.say(said).await;
    assert!(is_reset(&said), "{said:?}");
    stage.flow().await
}

#[tokio::test]
async fn a_denied_connection_is_reset_and_logged() {
    assert_eq!(
        denied(&["none"], &[], SSH, &[], b"").await,
        "not_allowed - 93.184.215.14:22 -"
    );
    assert_eq!(
        denied(&["all"], &["93.184.0.0/16"], SSH, &[], b"").await,
        "deny_list - 93.184.215.14:22 93.184.0.0/16"
    );
    assert_eq!(
        denied(&["git.example"], &[], SSH, &["git.example"], b"").await,
        "port_closed git.example 93.184.215.14:22 -"
    );
    for (to, want) in [
        ("169.254.169.254:80", "this_machine - 169.254.169.254:80 -"),
        ("127.0.0.1:22", "this_machine - 127.0.0.1:22 -"),
        ("10.0.0.1:443", "private_address - 10.0.0.1:443 -"),
        ("198.18.0.1:22", "private_address - 198.18.0.1:22 -"),
    ] {
        assert_eq!(denied(&["all"], &[], to, &[], b"").await, want);
    }
}

#[tokio::test]
async fn a_host_port_rule_allows_addresses_of_sent_replies() {
    let stage = Stage::open(policy(&["git.example:22"], &[]), SSH, echo().await).await;
    stage.tell("git.example", ADDRESS);
    let mut stream = stage.connect().await;
    stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut stream).await.unwrap(), b"SSH-2.0-x\r\n");
    assert_eq!(
        stage.flow().await,
        "allowed git.example 93.184.215.14:22 git.example:22"
    );
}

#[tokio::test]
async fn cidr_rules_and_all_need_no_name() {
    for (rule, to) in [
        ("10.1.0.0/16:5432", "10.1.2.3:5432"),
        ("all", TLS),
        ("all", SSH),
    ] {
        let stage = Stage::open(policy(&[rule], &[]), to, echo().await).await;
        let mut stream = stage.connect().await;
        stream.write_all(b"hi").await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(read_all(&mut stream).await.unwrap(), b"hi");
        assert_eq!(stage.flow().await, format!("allowed - {to} {rule}"));
    }
}

#[tokio::test]
async fn an_unreachable_upstream_is_a_reset() {
    let stage = Stage::open(policy(&["all"], &[]), SSH, nobody().await).await;
    assert!(is_reset(&stage.say(b"").await));
    assert_eq!(stage.flow().await, "unreachable - 93.184.215.14:22 -");
}

#[tokio::test]
async fn a_server_may_half_close_first() {
    let server = server(|mut stream| async move {
        stream.write_all(b"welcome").await?;
        stream.shutdown().await?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await?;
        assert_eq!(said, b"thanks");
        Ok(())
    });
    let stage = Stage::open(policy(&["all"], &[]), SSH, server.await).await;
    let mut stream = stage.connect().await;
    assert_eq!(read_all(&mut stream).await.unwrap(), b"welcome");
    stream.write_all(b"thanks").await.unwrap();
    stream.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_reset_is_relayed() {
    let server = server(|mut stream| async move {
        stream.write_all(b"bye").await?;
        stream.read_u8().await?;
        stream.set_zero_linger()
    });
    let stage = Stage::open(policy(&["all"], &[]), SSH, server.await).await;
    let mut stream = stage.connect().await;
    let mut bytes = [0; 3];
    stream.read_exact(&mut bytes).await.unwrap();
    stream.write_all(b"x").await.unwrap();
    assert!(is_reset(&read_all(&mut stream).await));
}

#[tokio::test]
async fn a_reset_after_half_close_is_detected() {
    let (told, mut heard) = tokio::sync::mpsc::channel(1);
    let server = server(move |mut stream| {
        let told = told.clone();
        async move {
            let mut said = Vec::new();
            stream.read_to_end(&mut said).await?;
            // It sends nothing, so only a socket error shows the reset.
            let gone = stream.ready(tokio::io::Interest::ERROR).await;
            told.send(gone.is_ok()).await.map_err(io::Error::other)
        }
    });
    let stage = Stage::open(policy(&["all"], &[]), SSH, server.await).await;
    let mut stream = stage.connect().await;
    stream.write_all(b"bye").await.unwrap();
    stream.shutdown().await.unwrap();
    sleep(Duration::from_millis(50)).await;
    stream.set_zero_linger().unwrap();
    drop(stream);
    assert!(timeout(SOON, heard.recv()).await.unwrap().unwrap());
}

#[tokio::test]
async fn bytes_before_a_reset_are_relayed() {
    let server = server(|mut stream| async move {
        stream.read_u8().await?;
        stream.write_all(b"too large").await?;
        // Closing with unread bytes resets the connection.
        Ok(())
    });
    let stage = Stage::open(policy(&["all"], &[]), SSH, server.await).await;
    let mut stream = stage.connect().await;
    stream.write_all(&[7; 100_000]).await.unwrap();
    let mut heard = [0; 9];
    stream.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"too large");
}

#[tokio::test(start_paused = true)]
async fn idle_connections_time_out() {
    let stage = Stage::open(policy(&["all"], &[]), SSH, echo().await).await;
    let mut stream = stage.connect().await;
    stream.write_all(b"x").await.unwrap();
    stream.read_u8().await.unwrap();
    let start = tokio::time::Instant::now();
    let ended = stream.read_u8().await;
    assert!(is_reset(&ended), "{ended:?}");
    let silent = start.elapsed();
    assert!(
        (relay::IDLE_MAX..=2 * relay::IDLE_MAX).contains(&silent),
        "{silent:?}"
    );
}

#[tokio::test]
async fn connections_per_sandbox_are_limited() {
    let limits = Limits {
        connections: 2,
        bandwidth: None,
    };
    let stage = Stage::with_limits(policy(&["all"], &[]), limits, SSH, echo().await).await;
    let mut first = stage.connect().await;
    let mut second = stage.connect().await;
    for stream in [&mut first, &mut second] {
        stream.write_all(b"x").await.unwrap();
        stream.read_u8().await.unwrap();
    }
    assert!(is_reset(&stage.say(b"").await));
    let flows = stage.flows(2).await;
    assert_eq!(text(&flows[1]), "too_many_connections - 93.184.215.14:22 -");
    first.shutdown().await.unwrap();
    read_all(&mut first).await.unwrap();
    let again = async { while is_reset(&stage.say(b"x").await) {} };
    // A connection that stays open was accepted.
    assert!(timeout(Duration::from_millis(300), again).await.is_err());
    drop(second);
}

#[tokio::test]
async fn the_descriptor_budget_leaves_connections_to_others() {
    let limits = Limits {
        connections: 1000,
        bandwidth: None,
    };
    let budget = Arc::new(Budget::new(40));
    let greedy = Stage::sharing(&budget, limits, SSH, echo().await).await;
    let other = Stage::sharing(&budget, limits, SSH, echo().await).await;
    let mut held = Vec::new();
    loop {
        let mut stream = greedy.connect().await;
        let said = stream.write_all(b"x").await;
        if said.is_err() || stream.read_u8().await.is_err() {
            break;
        }
        held.push(stream);
    }
    // 40 descriptors: as many are free as it has, without the quarter reserved for sandboxes with few.
    assert_eq!(held.len(), 8);
    let flows = greedy.flows(2).await;
    assert_eq!(text(&flows[1]), "too_many_connections - 93.184.215.14:22 -");
    let mut stream = other.connect().await;
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    drop(held);
}

#[tokio::test]
async fn bandwidth_is_limited() {
    let limits = Limits {
        connections: 8,
        bandwidth: Some(4 << 20),
    };
    let stage = Stage::with_limits(policy(&["all"], &[]), limits, SSH, echo().await).await;
    let start = Instant::now();
    let mut stream = stage.connect().await;
    let bytes: Vec<u8> = (0..3 << 20).map(|n: u32| n.to_le_bytes()[1]).collect();
    let (mut read, mut write) = stream.split();
    let (sent, echoed) = tokio::join!(
        async {
            write.write_all(&bytes).await?;
            write.shutdown().await
        },
        async {
            let mut echoed = Vec::new();
            read.read_to_end(&mut echoed).await.map(|_| echoed)
        }
    );
    sent.unwrap();
    assert!(echoed.unwrap() == bytes);
    // 6 MiB, both directions together, minus the burst of a quarter of a second.
    let took = start.elapsed().as_secs_f64();
    assert!((1.2..10.0).contains(&took), "{took}");
}

#[tokio::test]
async fn all_bytes_are_relayed_unchanged() {
    let stage = Stage::open(policy(&["all"], &[]), SSH, echo().await).await;
    let mut stream = stage.connect().await;
    let bytes: Vec<u8> = (0..8_u32 << 20)
        .map(|n| (n ^ (n >> 9)).to_le_bytes()[0])
        .collect();
    let (mut read, mut write) = stream.split();
    let sent = async {
        for (number, piece) in bytes.chunks(100_003).enumerate() {
            write.write_all(piece).await.unwrap();
            if number % 16 == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        }
        write.shutdown().await.unwrap();
    };
    let mut echoed = Vec::new();
    let (_, read) = tokio::join!(sent, read.read_to_end(&mut echoed));
    read.unwrap();
    assert!(echoed == bytes);
}
