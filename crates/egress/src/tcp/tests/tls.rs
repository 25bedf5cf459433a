//! TLS on port 443.

use super::*;
use tokio::net::TcpStream;

async fn allowed(allow: &[&str], deny: &[&str], said: &[u8]) -> String {
    let stage = Stage::open(policy(allow, deny), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    stream.write_all(said).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut stream).await.unwrap(), said);
    stage.flow().await
}

#[tokio::test]
async fn an_allowed_name_with_its_address() {
    let want = "allowed a.example 93.184.215.14:443 a.example";
    assert_eq!(
        allowed(&["a.example"], &[], &hello("a.example")).await,
        want
    );
    let large = hello_with("a.example", |config| {
        config.alpn_protocols = vec![vec![b'x'; 250]; 150];
    });
    assert_eq!(allowed(&["a.example"], &[], &large).await, want);
    let want = "allowed a.example 93.184.215.14:443 *.example";
    assert_eq!(
        allowed(&["*.example"], &[], &hello("a.example")).await,
        want
    );
}

#[tokio::test]
async fn under_all_the_sni_is_checked_if_names_are_denied() {
    let deny = &["b.example"];
    let want = "allowed a.example 93.184.215.14:443 all";
    assert_eq!(allowed(&["all"], deny, &hello("a.example")).await, want);
    let want = "allowed - 93.184.215.14:443 all";
    assert_eq!(allowed(&["all"], deny, &hello("192.0.2.1")).await, want);
    assert_eq!(allowed(&["all"], deny, b"SSH-2.0-on-443\r\n").await, want);
    let want = "deny_list b.example 93.184.215.14:443 b.example";
    assert_eq!(
        denied(&["all"], deny, TLS, &[], &hello("b.example")).await,
        want
    );
    assert_eq!(
        denied(&["93.184.0.0/16"], deny, TLS, &[], &hello("b.example")).await,
        want
    );
    let cut = &hello("a.example")[..20];
    let stage = Stage::open(policy(&["all"], deny), TLS, nobody().await).await;
    let mut stream = stage.connect().await;
    stream.write_all(cut).await.unwrap();
    stream.shutdown().await.unwrap();
    assert!(is_reset(&read_all(&mut stream).await));
    assert_eq!(stage.flow().await, "malformed - 93.184.215.14:443 -");
}

#[tokio::test]
async fn connections_without_an_allowed_name_are_denied() {
    let told = &["a.example", "b.example"];
    let hidden = hello_of(&[sni(b"a.example"), (0xfe0d, vec![0; 64])]);
    let two = hello_of(&[sni(b"a.example"), sni(b"b.example")]);
    for (said, want) in [
        (
            hello("b.example"),
            "not_allowed b.example 93.184.215.14:443 -",
        ),
        (hello("192.0.2.1"), "no_name - 93.184.215.14:443 -"),
        (hello_of(&[]), "no_name - 93.184.215.14:443 -"),
        (
            hello_of(&[sni(b"93.184.215.14")]),
            "no_name - 93.184.215.14:443 -",
        ),
        (hidden, "encrypted_hello a.example 93.184.215.14:443 -"),
        (two, "malformed - 93.184.215.14:443 -"),
        (
            b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n".to_vec(),
            "malformed - 93.184.215.14:443 -",
        ),
        (vec![22, 3, 1, 0, 0], "malformed - 93.184.215.14:443 -"),
    ] {
        assert_eq!(denied(&["a.example"], &[], TLS, told, &said).await, want);
    }
    // The name is allowed, but DNS did not return this address for it.
    let want = "unresolved a.example 93.184.215.14:443 -";
    assert_eq!(
        denied(
            &["a.example"],
            &[],
            TLS,
            &["b.example"],
            &hello("a.example")
        )
        .await,
        want
    );
    let want = "port_closed a.example 93.184.215.14:443 -";
    assert_eq!(
        denied(&["a.example:22"], &[], TLS, told, &hello("a.example")).await,
        want
    );
}

#[tokio::test]
async fn a_client_hello_in_many_small_writes_is_accepted() {
    let stage = Stage::open(policy(&["a.example"], &[]), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let said = hello("a.example");
    for piece in said.chunks(7) {
        stream.write_all(piece).await.unwrap();
        sleep(Duration::from_millis(2)).await;
    }
    let mut echoed = vec![0; said.len()];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(echoed, said);
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_client_hello_times_out() {
    for (said, want) in [(&b""[..], "no_name"), (&[22, 3, 1], "malformed")] {
        let flow = denied(&["a.example"], &[], TLS, &[], said).await;
        assert_eq!(flow, format!("{want} - 93.184.215.14:443 -"));
    }
}

#[tokio::test]
async fn a_close_without_a_client_hello_is_logged() {
    let stage = Stage::open(policy(&["a.example"], &[]), TLS, nobody().await).await;
    drop(stage.connect().await);
    assert_eq!(stage.flow().await, "no_name - 93.184.215.14:443 -");
}

#[tokio::test]
async fn a_policy_change_closes_by_name() {
    let stage = Stage::open(policy(&["a.example", "b.example"], &[]), TLS, echo().await).await;
    stage.tell("a.example", ADDRESS);
    let mut stream = stage.connect().await;
    let said = hello("a.example");
    stream.write_all(&said).await.unwrap();
    stream.read_exact(&mut vec![0; said.len()]).await.unwrap();
    stage.sandbox.set_policy(policy(&["b.example"], &[]));
    assert!(is_reset(&read_all(&mut stream).await));
    let flows = stage.flows(2).await;
    assert_eq!(
        text(&flows[1]),
        "policy_changed a.example 93.184.215.14:443 -"
    );
}

#[tokio::test]
async fn alerts_and_closes_of_the_server_are_relayed() {
    for (answer, want) in [
        (&b""[..], &b""[..]),
        (&[21, 3, 3, 0, 2, 2, 40], &[21, 3, 3, 0, 2, 2, 40]),
    ] {
        let server = server(move |mut stream: TcpStream| async move {
            stream.read_u8().await?;
            stream.write_all(answer).await?;
            stream.shutdown().await?;
            stream.read_to_end(&mut Vec::new()).await.map(|_| ())
        });
        let stage = Stage::open(policy(&["a.example"], &[]), TLS, server.await).await;
        stage.tell("a.example", ADDRESS);
        let mut stream = stage.connect().await;
        stream.write_all(&hello("a.example")).await.unwrap();
        let mut heard = vec![0; want.len()];
        stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(heard, want);
        stream.shutdown().await.unwrap();
        assert!(read_all(&mut stream).await.unwrap().is_empty());
    }
}
