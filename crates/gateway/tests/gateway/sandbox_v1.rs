//! The `sandbox.v1` API: the texts that its clients match, and the isolation of principals.

use crate::server::{SOON, TestServer};
use k8e_api::sandbox_v1 as pb;
use k8e_api::sandbox_v1::sandbox_service_client::SandboxServiceClient;
use k8e_model::ApiKey;
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

pub(crate) type Client = SandboxServiceClient<InterceptedService<Channel, WithKey>>;

/// Puts an API key into every call, as older `sandbox.v1` clients do.
#[derive(Clone)]
pub(crate) struct WithKey(String);

impl Interceptor for WithKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let key = self.0.parse().unwrap();
        request.metadata_mut().insert("authorization", key);
        Ok(request)
    }
}

pub(crate) async fn client(server: &TestServer, key: &ApiKey) -> Client {
    let ca = std::fs::read(server.admin_dir().join("ca.crt")).unwrap();
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
    let address = format!("https://{}", server.tcp().unwrap());
    let channel = Endpoint::from_shared(address)
        .unwrap()
        .tls_config(tls)
        .unwrap()
        .connect()
        .await
        .unwrap();
    SandboxServiceClient::with_interceptor(channel, WithKey(key.reveal()))
}

async fn session(client: &mut Client) -> String {
    let request = pb::CreateSessionRequest::default();
    let made = client.create_session(request).await.unwrap();
    made.into_inner().session_id
}

/// Guests of tests run on this machine, where there is no workspace.
fn exec(session_id: &str, command: &str) -> pb::ExecRequest {
    pb::ExecRequest {
        session_id: session_id.to_owned(),
        command: command.to_owned(),
        workdir: "/".to_owned(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sandbox_v1_clients_find_the_texts_they_match() {
    let server = TestServer::start().await;
    let mut ann = client(&server, &server.key("ann").await).await;
    let probe = pb::DestroySessionRequest {
        session_id: "healthcheck-probe-noop".into(),
    };
    let healthy = ann.destroy_session(probe).await.unwrap_err();
    assert_eq!(healthy.code(), Code::NotFound);
    assert_eq!(
        healthy.message(),
        "session healthcheck-probe-noop not found"
    );
    let id = session(&mut ann).await;
    assert!(id.starts_with("sess-"));
    let ended = ann.exec(exec(&id, "echo out; exit 3")).await.unwrap();
    let ended = ended.into_inner();
    assert_eq!(
        (ended.exit_code, &*ended.stdout, &*ended.status),
        (3, "out\n", "completed")
    );
    let slow = pb::ExecRequest {
        timeout: 1,
        ..exec(&id, "sleep 1000")
    };
    assert_eq!(
        ann.exec(slow).await.unwrap().into_inner().status,
        "timed_out"
    );
    let poll = pb::PollRunRequest {
        run_id: "sess-1-bg-2".into(),
    };
    let unknown = ann.poll_run(poll).await.unwrap_err();
    assert_eq!(
        (unknown.code(), unknown.message()),
        (Code::NotFound, "run sess-1-bg-2 not found")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_began_is_not_run_again() {
    let server = TestServer::start().await;
    let mut ann = client(&server, &server.key("ann").await).await;
    let id = session(&mut ann).await;
    let mut stream = ann
        .exec_stream(exec(&id, "echo begun; sleep 1000"))
        .await
        .unwrap()
        .into_inner();
    let first = tokio::time::timeout(SOON, stream.message()).await.unwrap();
    assert_eq!(first.unwrap().unwrap().chunk, "begun\n");
    let destroy = pb::DestroySessionRequest {
        session_id: id.clone(),
    };
    assert!(ann.destroy_session(destroy).await.unwrap().into_inner().ok);
    let ended = tokio::time::timeout(SOON, stream.message()).await.unwrap();
    // The command line of the Go K8E would take `Unavailable` for an old session.
    assert_eq!(ended.unwrap_err().code(), Code::Aborted);
    let gone = ann.exec(exec(&id, "true")).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

/// Every call that names something, as somebody makes it.
async fn every_call(
    client: &mut Client,
    session: &str,
    terminal: &str,
    run: &str,
    approval: &str,
) -> Vec<(String, Status)> {
    let session_id = session.to_owned();
    let terminal_id = terminal.to_owned();
    let mut refused = Vec::new();
    macro_rules! refuses {
        ($($call:ident $request:ident { $($field:ident: $value:expr),* };)*) => {$(
            let request = pb::$request { $($field: $value),* };
            let status = client.$call(request).await.map(drop).unwrap_err();
            refused.push((stringify!($call).replace('_', ""), status));
        )*};
    }
    refuses! {
        get_session GetSessionRequest { session_id: session_id.clone() };
        destroy_session DestroySessionRequest { session_id: session_id.clone() };
        write_file WriteFileRequest { session_id: session_id.clone(), path: "f".into(), content: String::new(), mode: String::new() };
        read_file ReadFileRequest { session_id: session_id.clone(), path: "f".into() };
        list_files ListFilesRequest { session_id: session_id.clone(), since: 0 };
        pip_install PipInstallRequest { session_id: session_id.clone(), packages: vec!["a".into()] };
        poll_run PollRunRequest { run_id: run.to_owned() };
        get_transcript GetTranscriptRequest { session_id: session_id.clone(), offset: 0, limit: 0 };
        get_events GetEventsRequest { session_id: session_id.clone(), limit: 0 };
        get_processes GetProcessesRequest { session_id: session_id.clone() };
        create_terminal CreateTerminalRequest { session_id: session_id.clone(), argv: vec!["sh".into()], workdir: String::new(), env: [].into(), rows: 0, cols: 0 };
        terminal_stream TerminalStreamRequest { terminal_id: terminal_id.clone() };
        terminal_write TerminalWriteRequest { terminal_id: terminal_id.clone(), data: Vec::new().into() };
        terminal_resize TerminalResizeRequest { terminal_id: terminal_id.clone(), rows: 1, cols: 1 };
        terminal_foreground TerminalForegroundRequest { terminal_id: terminal_id.clone() };
        terminal_signal TerminalSignalRequest { terminal_id: terminal_id.clone(), signal: 2 };
        terminal_destroy TerminalDestroyRequest { terminal_id: terminal_id.clone(), grace_ms: 0 };
        update_allowed_hosts UpdateAllowedHostsRequest { session_id: session_id.clone(), hosts: vec![] };
        pause_session PauseSessionRequest { session_id: session_id.clone() };
        resume_session ResumeSessionRequest { session_id: session_id.clone() };
        run_sub_agent RunSubAgentRequest { parent_session_id: session_id.clone(), agent_type: String::new(), workspace_path: String::new() };
        confirm_action ConfirmActionRequest { session_id: session_id.clone(), action: "a".into(), approval_id: String::new() };
        confirm_action ConfirmActionRequest { session_id: session_id.clone(), action: String::new(), approval_id: approval.to_owned() };
        approve_action ApproveActionRequest { approval_id: approval.to_owned(), approved: true, reason: String::new() };
        expose_service ExposeServiceRequest { session_id: session_id.clone(), port: 80, host: String::new() };
        unexpose_service UnexposeServiceRequest { session_id: session_id.clone(), port: 80 };
        list_exposed ListExposedRequest { session_id: session_id.clone() };
    }
    for background in [false, true] {
        let request = pb::ExecRequest {
            background,
            ..exec(session, "true")
        };
        let status = client.exec(request).await.map(drop).unwrap_err();
        refused.push(("exec".to_owned(), status));
    }
    let stream = client.exec_stream(exec(session, "true")).await;
    refused.push(("execstream".to_owned(), stream.map(drop).unwrap_err()));
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_anothers_is_not_found() {
    let server = TestServer::start().await;
    let mut ann = client(&server, &server.key("ann").await).await;
    let mut bob = client(&server, &server.key("bob").await).await;
    let id = session(&mut ann).await;
    let background = pb::ExecRequest {
        background: true,
        ..exec(&id, "sleep 1000")
    };
    let run = ann.exec(background).await.unwrap().into_inner().run_id;
    let terminal = pb::CreateTerminalRequest {
        session_id: id.clone(),
        argv: vec!["cat".into()],
        workdir: "/".into(),
        ..Default::default()
    };
    let terminal = ann.create_terminal(terminal).await.unwrap().into_inner();
    let terminal = terminal.terminal_id;
    let ask = pb::ConfirmActionRequest {
        session_id: id.clone(),
        action: "deploy".into(),
        ..Default::default()
    };
    let approval = ann.confirm_action(ask).await.unwrap().into_inner();
    let approval = approval.approval_id;

    let refused = every_call(&mut bob, &id, &terminal, &run, &approval).await;
    assert!(refused.len() >= 30, "{} attempts", refused.len());
    for (call, status) in &refused {
        assert_eq!(status.code(), Code::NotFound, "{call}: {status}");
        let text = status.message();
        let hidden = [&id, &terminal, &run, &approval].map(|id| format!("{id} not found"));
        assert!(
            hidden.iter().any(|end| text.ends_with(end)),
            "{call}: {text}"
        );
    }
    let tried = |name: &str| {
        refused
            .iter()
            .any(|(call, _)| call.eq_ignore_ascii_case(name))
    };
    for name in calls_that_name_something() {
        assert!(tried(&name), "{name} is not tried");
    }
    let listed = bob.list_sessions(pb::ListSessionsRequest::default()).await;
    assert!(listed.unwrap().into_inner().sessions.is_empty());
    let poll = pb::PollRunRequest { run_id: run };
    let still = ann.poll_run(poll).await.unwrap().into_inner();
    assert_eq!(still.status, "running");
}

/// From the description: the first field of their requests is an id.
fn calls_that_name_something() -> Vec<String> {
    let set = FileDescriptorSet::decode(pb::FILE_DESCRIPTOR_SET).unwrap();
    let file = &set.file[0];
    let names_one = |request: &str| {
        let request = request.rsplit('.').next();
        let message = file
            .message_type
            .iter()
            .find(|message| Some(message.name()) == request);
        let field = message.unwrap().field.first();
        field.is_some_and(|field| field.name().ends_with("_id"))
    };
    let methods = file.service[0].method.iter();
    methods
        .filter(|method| names_one(method.input_type()) && method.name() != "CreateSession")
        .map(|method| method.name().to_owned())
        .collect()
}
