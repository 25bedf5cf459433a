//! Brute-force throttling of API keys.

use crate::identity::status;
use crate::server::TestServer;
use k8e_api::v1;
use k8e_model::ApiKey;
use tonic::Code;

#[tokio::test(flavor = "multi_thread")]
async fn who_guesses_is_slowed_down_and_nobody_else() {
    let server = TestServer::start().await;
    let (known, new) = (server.key("known").await, server.key("new").await);
    let mut before = server.with_key(&known).await;
    status(&mut before).await.unwrap();

    let guesser = server.with_key(&ApiKey::random()).await;
    let guesses = (0..1000).map(|_| {
        let mut guesser = guesser.clone();
        async move { status(&mut guesser).await.unwrap_err().code() }
    });
    let answers = futures::future::join_all(guesses).await;
    let told = answers
        .iter()
        .filter(|code| **code == Code::Unauthenticated)
        .count();
    let slowed = answers
        .iter()
        .filter(|code| **code == Code::ResourceExhausted)
        .count();
    assert_eq!(told + slowed, 1000);
    assert!(told <= 30, "{told} were told that they are wrong");

    // Who was right from there before goes on, also on a new connection; certificates, too.
    status(&mut before).await.unwrap();
    status(&mut server.with_key(&known).await).await.unwrap();
    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    status(&mut admin).await.unwrap();
    server
        .local()
        .await
        .get_status(v1::GetStatusRequest {})
        .await
        .unwrap();
    // A key that was never right from there might be the guess.
    let refused = status(&mut server.with_key(&new).await).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(k8e_api::status::retry_after(&refused).is_some());
    // It takes a breath, no more.
    let in_the_end = async {
        while status(&mut server.with_key(&new).await).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
    };
    tokio::time::timeout(crate::server::SOON, in_the_end)
        .await
        .unwrap();
}
