//! Secrets over the wire: in, and never out.

use crate::server::TestServer;
use k8e_api::client::Client;
use k8e_api::v1;
use tonic::Code;

const PLAIN: &str = "hunter2-hunter2-hunter2";

async fn set(client: &mut Client, name: &str, principal: &str) -> Result<(), tonic::Status> {
    let request = v1::SetSecretRequest {
        name: name.to_owned(),
        key: "token".to_owned(),
        value: PLAIN.into(),
        principal: principal.to_owned(),
    };
    client.secrets.set_secret(request).await.map(drop)
}

async fn list(client: &mut Client) -> Vec<v1::SecretEntry> {
    let listed = client.secrets.list_secrets(v1::ListSecretsRequest {}).await;
    listed.unwrap().into_inner().secrets
}

async fn delete(client: &mut Client, name: &str) -> Result<(), tonic::Status> {
    let request = v1::DeleteSecretRequest {
        name: name.to_owned(),
        ..Default::default()
    };
    client.secrets.delete_secret(request).await.map(drop)
}

async fn output(client: &mut Client, start: v1::RunStart) -> Vec<u8> {
    let start = v1::RunRequest {
        message: Some(v1::run_request::Message::Start(start)),
    };
    let events = client.run(tokio_stream::iter([start])).await;
    let mut events = events.unwrap().into_inner();
    let mut output = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        if let Some(v1::run_event::Event::Stdout(bytes)) = event.event {
            output.extend_from_slice(&bytes);
        }
    }
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_its_owners() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let mut bob = server.with_key(&server.key("bob").await).await;
    set(&mut ann, "github", "").await.unwrap();
    let listed = list(&mut ann).await;
    assert_eq!(
        (listed[0].owner.as_str(), listed[0].key.as_str()),
        ("user:ann", "token")
    );
    assert!(!format!("{listed:?}").contains(PLAIN));
    assert!(list(&mut bob).await.is_empty());
    assert_eq!(
        delete(&mut bob, "github").await.unwrap_err().code(),
        Code::NotFound
    );
    let refused = set(&mut bob, "github", "ann").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut root = server.local().await;
    set(&mut root, "other", "ann").await.unwrap();
    assert_eq!(list(&mut ann).await.len(), 2);
    delete(&mut ann, "github").await.unwrap();
    delete(&mut ann, "other").await.unwrap();
    assert!(list(&mut ann).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_shows_which_variables_and_not_what_is_in_them() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    set(&mut ann, "github", "").await.unwrap();
    let wanted = v1::SecretRef {
        secret_name: "github".to_owned(),
        key: "token".to_owned(),
        env_var: "TOKEN".to_owned(),
    };
    let create = v1::CreateSessionRequest {
        secret_refs: vec![wanted.clone()],
        ..Default::default()
    };
    let made = ann.create_session(create).await.unwrap().into_inner();
    assert_eq!(made.secret_env_vars, ["TOKEN"]);
    assert!(made.env_keys.is_empty() && !format!("{made:?}").contains(PLAIN));
    let echo = v1::RunStart {
        session_id: made.session_id.clone(),
        program: Some(v1::run_start::Program::Argv(v1::Argv {
            args: vec!["sh".into(), "-c".into(), "echo ${#TOKEN}".into()],
        })),
        cwd: "/tmp".to_owned(),
        ..Default::default()
    };
    assert_eq!(output(&mut ann, echo).await, b"23\n");
    let twice = v1::CreateSessionRequest {
        secret_refs: vec![wanted.clone(), wanted],
        ..Default::default()
    };
    let refused = ann.create_session(twice).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().starts_with("secret_refs: "));
}
