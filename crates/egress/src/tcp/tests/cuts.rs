//! What closes a connection that was allowed: policy changes, dropping the gate.

use super::*;

#[tokio::test]
async fn a_policy_change_closes_denied_connections() {
    for (to, allow) in [
        (SSH, "git.example:22"),
        (SSH, "all"),
        (TLS, "93.184.0.0/16"),
    ] {
        let stage = Stage::open(policy(&[allow, "x.example"][..1], &[]), to, echo().await).await;
        stage.tell("git.example", ADDRESS);
        let mut stream = stage.connect().await;
        let mut byte = [0];
        for change in [policy(&[allow], &["other.test"]), policy(&[allow], &[])] {
            stream.write_all(b"x").await.unwrap();
            stream.read_exact(&mut byte).await.unwrap();
            stage.sandbox.set_policy(change);
            sleep(Duration::from_millis(20)).await;
        }
        stream.write_all(b"x").await.unwrap();
        stream.read_exact(&mut byte).await.unwrap();
        let cut = Instant::now();
        stage.sandbox.set_policy(policy(&["other.example"], &[]));
        assert!(is_reset(&read_all(&mut stream).await));
        assert!(
            cut.elapsed() < Duration::from_secs(1),
            "{:?}",
            cut.elapsed()
        );
        let flows = stage.flows(2).await;
        assert!(text(&flows[0]).starts_with("allowed"), "{flows:?}");
        assert!(text(&flows[1]).starts_with("policy_changed"), "{flows:?}");
    }
}

#[tokio::test]
async fn buffered_bytes_are_not_sent_after_a_policy_change() {
    let (told, mut heard) = tokio::sync::mpsc::channel(1);
    let server = server(move |mut stream| {
        let told = told.clone();
        async move {
            // Not read until the connection was closed.
            sleep(Duration::from_millis(500)).await;
            let read = stream.read_to_end(&mut Vec::new()).await;
            told.send(is_reset(&read)).await.map_err(io::Error::other)
        }
    });
    let stage = Stage::open(policy(&["all"], &[]), SSH, server.await).await;
    let mut stream = stage.connect().await;
    let flood = vec![7; 16 << 20];
    let _ = timeout(Duration::from_millis(200), stream.write_all(&flood)).await;
    stage.sandbox.set_policy(policy(&["none"], &[]));
    assert!(timeout(SOON, heard.recv()).await.unwrap().unwrap());
}

#[tokio::test]
async fn dropping_the_gate_closes_all_connections() {
    let stage = Stage::open(policy(&["all"], &[]), SSH, echo().await).await;
    let mut stream = stage.connect().await;
    stream.write_all(b"x").await.unwrap();
    stream.read_u8().await.unwrap();
    let gate = stage.gate;
    drop(stage);
    assert!(is_reset(&read_all(&mut stream).await));
    assert!(tokio::net::TcpStream::connect(gate).await.is_err());
}
