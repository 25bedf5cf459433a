//! Two principals: what is one's does not exist for the other.

use crate::server::TestServer;
use k8e_api::client::Client;
use k8e_api::{sandbox_v1, v1};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use std::time::{Duration, Instant};
use tonic::{Code, Status};

/// Every call that takes a session, as somebody makes it.
async fn every_call(client: &Client, id: &str) -> Vec<(&'static str, Status)> {
    let session_id = id.to_owned();
    let path = || b"f".to_vec().into();
    let mut refused = Vec::new();
    macro_rules! refuses {
        ($call:ident, $request:expr) => {
            let answer = client.clone().$call($request).await;
            refused.push((stringify!($call), refusal(answer).await));
        };
    }
    refuses!(
        get_session,
        v1::GetSessionRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        destroy_session,
        v1::DestroySessionRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        pause_session,
        v1::PauseSessionRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        resume_session,
        v1::ResumeSessionRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        fork_session,
        v1::ForkSessionRequest {
            session_id: session_id.clone(),
            count: 1,
            ..Default::default()
        }
    );
    refuses!(
        get_session_metrics,
        v1::GetSessionMetricsRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        watch_files,
        v1::WatchFilesRequest {
            session_id: session_id.clone(),
            path: path(),
            recursive: false
        }
    );
    refuses!(
        create_sub_agent,
        v1::CreateSubAgentRequest {
            parent_session_id: session_id.clone(),
            ..Default::default()
        }
    );
    refuses!(
        update_allowed_hosts,
        v1::UpdateAllowedHostsRequest {
            session_id: session_id.clone(),
            hosts: vec![]
        }
    );
    refuses!(
        watch_egress,
        v1::WatchEgressRequest {
            session_id: session_id.clone(),
            ..Default::default()
        }
    );
    refuses!(
        read_file,
        v1::ReadFileRequest {
            session_id: session_id.clone(),
            path: path(),
            ..Default::default()
        }
    );
    refuses!(
        list_files,
        v1::ListFilesRequest {
            session_id: session_id.clone(),
            path: path(),
            ..Default::default()
        }
    );
    refuses!(
        stat_file,
        v1::StatFileRequest {
            session_id: session_id.clone(),
            path: path()
        }
    );
    refuses!(
        make_dir,
        v1::MakeDirRequest {
            session_id: session_id.clone(),
            path: path(),
            ..Default::default()
        }
    );
    refuses!(
        move_file,
        v1::MoveFileRequest {
            session_id: session_id.clone(),
            from: path(),
            to: path()
        }
    );
    refuses!(
        remove_file,
        v1::RemoveFileRequest {
            session_id: session_id.clone(),
            path: path(),
            recursive: true
        }
    );
    refuses!(
        list_processes,
        v1::ListProcessesRequest {
            session_id: session_id.clone()
        }
    );
    refuses!(
        get_transcript,
        v1::GetTranscriptRequest {
            session_id: session_id.clone(),
            ..Default::default()
        }
    );
    refuses!(
        get_events,
        v1::GetEventsRequest {
            session_id: session_id.clone(),
            ..Default::default()
        }
    );
    refuses!(
        expose_service,
        v1::ExposeServiceRequest {
            session_id: session_id.clone(),
            port: 80,
            ..Default::default()
        }
    );
    refuses!(
        unexpose_service,
        v1::UnexposeServiceRequest {
            session_id: session_id.clone(),
            port: 80
        }
    );
    refuses!(
        list_exposed,
        v1::ListExposedRequest {
            session_id: session_id.clone()
        }
    );
    let argv = v1::Argv {
        args: vec!["true".into()],
    };
    let run = v1::RunStart {
        session_id: session_id.clone(),
        program: Some(v1::run_start::Program::Argv(argv)),
        ..Default::default()
    };
    let run = v1::RunRequest {
        message: Some(v1::run_request::Message::Start(run)),
    };
    refuses!(run, tokio_stream::iter([run]));
    let write = v1::WriteFileStart {
        session_id,
        path: path(),
        ..Default::default()
    };
    let write = v1::WriteFileRequest {
        message: Some(v1::write_file_request::Message::Start(write)),
    };
    refuses!(write_file, tokio_stream::iter([write]));
    refused
}

/// All calls but those that are about no session, in lower case.
fn calls_about_a_session() -> Vec<String> {
    let files = FileDescriptorSet::decode(v1::FILE_DESCRIPTOR_SET)
        .unwrap()
        .file;
    let services = files.iter().flat_map(|file| &file.service);
    let sandboxes = services.filter(|service| service.name() == "Sandboxes");
    let methods = sandboxes.flat_map(|service| &service.method);
    let others = [
        "GetStatus",
        "CreateSession",
        "FindRunSession",
        "ListSessions",
        "GetPools",
    ];
    // Runs and terminals have ids of their own: `background` and `terminals` try those of others.
    let elsewhere = |name: &str| {
        name.contains("Terminal")
            || (name != "Run" && (name.ends_with("Run") || name == "ListRuns"))
    };
    let mut calls: Vec<_> = methods
        .filter(|method| !others.contains(&method.name()) && !elsewhere(method.name()))
        .map(|method| method.name().to_lowercase())
        .collect();
    calls.sort();
    calls
}

async fn refusal<T>(answer: Result<tonic::Response<T>, Status>) -> Status {
    answer.err().expect("it is refused")
}

async fn create(client: &mut Client) -> String {
    let create = v1::CreateSessionRequest::default();
    client
        .create_session(create)
        .await
        .unwrap()
        .into_inner()
        .session_id
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_anothers_does_not_exist() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let bob = server.with_key(&server.key("bob").await).await;
    let (anns, ended) = (create(&mut ann).await, create(&mut ann).await);
    let over = v1::DestroySessionRequest {
        session_id: ended.clone(),
    };
    ann.destroy_session(over).await.unwrap();
    let nobodys = "sess-aaaaaaaaaaaaaaaaaaaa".to_owned();
    let wanted = every_call(&bob, &nobodys).await;
    let mut tried: Vec<_> = wanted
        .iter()
        .map(|(call, _)| call.replace('_', ""))
        .collect();
    tried.sort();
    assert_eq!(tried, calls_about_a_session(), "each is tried here");
    for id in [&anns, &ended] {
        let got = every_call(&bob, id).await;
        for ((call, got), (_, wanted)) in got.iter().zip(&wanted) {
            assert_eq!(got.code(), Code::NotFound, "{call}: {got}");
            let wanted = wanted.message().replace(&nobodys, id);
            assert_eq!(got.message(), wanted, "{call}");
        }
    }
    // Nothing happened to it, and lists show one's own only.
    let get = v1::GetSessionRequest { session_id: anns };
    assert_eq!(
        ann.get_session(get).await.unwrap().into_inner().phase,
        "active"
    );
    let all = v1::ListSessionsRequest {
        phase: "all".to_owned(),
        tenant: String::new(),
    };
    let listed = bob.clone().list_sessions(all).await.unwrap().into_inner();
    assert!(listed.sessions.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn timing_does_not_tell() {
    let server = TestServer::start().await;
    let mut ann = server.with_key(&server.key("ann").await).await;
    let mut bob = server.with_key(&server.key("bob").await).await;
    let anns = create(&mut ann).await;
    let nobodys = "sess-aaaaaaaaaaaaaaaaaaaa".to_owned();
    // Others use this machine too: what is there shows every time.
    for _ in 0..5 {
        if same_time(&mut bob, &anns, &nobodys).await {
            return;
        }
    }
    panic!("somebody else's session takes another time than none");
}

/// Whether two refusals take the same time.
async fn same_time(bob: &mut Client, anns: &str, nobodys: &str) -> bool {
    const ROUNDS: usize = 200;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (id, times) in [anns, nobodys].into_iter().zip(&mut times) {
            let get = v1::GetSessionRequest {
                session_id: id.to_owned(),
            };
            let begun = Instant::now();
            bob.get_session(get).await.unwrap_err();
            times.push(begun.elapsed());
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times[ROUNDS / 2]
    };
    let [theirs, nobodys] = &mut times;
    let (theirs, nobodys) = (median(theirs), median(nobodys));
    // Reading a record takes as long again as the call; what is left is noise.
    theirs.abs_diff(nobodys) < nobodys / 4
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_its_principals_own() {
    let server = TestServer::start().await;
    let key = async |name| server.key_for(name, &["shared-name"]).await;
    let mut ann = server.with_key(&key("ann").await).await;
    let mut bob = server.with_key(&key("bob").await).await;
    let mut ids = Vec::new();
    for client in [&mut ann, &mut bob] {
        let argv = v1::Argv {
            args: vec!["true".into()],
        };
        let start = v1::RunStart {
            create: Some(v1::CreateSessionRequest {
                tenant: "shared-name".to_owned(),
                ..Default::default()
            }),
            program: Some(v1::run_start::Program::Argv(argv)),
            cwd: "/tmp".to_owned(),
            ..Default::default()
        };
        let start = v1::RunRequest {
            message: Some(v1::run_request::Message::Start(start)),
        };
        let mut events = client
            .run(tokio_stream::iter([start]))
            .await
            .unwrap()
            .into_inner();
        let first = events.message().await.unwrap().unwrap().event.unwrap();
        let v1::run_event::Event::Started(started) = first else {
            panic!("a run starts: {first:?}");
        };
        assert!(started.session_created);
        ids.push(started.session_id);
    }
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn both_apis_hold_a_key_to_its_tenants() {
    let server = TestServer::start().await;
    let key = server.key_for("ann", &["a", "b"]).await;
    let mut ann = server.with_key(&key).await;
    let status = ann.get_status(v1::GetStatusRequest {}).await.unwrap();
    let status = status.into_inner();
    assert_eq!(status.tenants, ["a", "b"]);
    assert_eq!(status.default_tenant, "a");

    let mut k8e = crate::sandbox_v1::client(&server, &key).await;
    let asked = [("", Some("a")), ("b", Some("b")), ("c", None)];
    for (tenant, made) in asked {
        let create = v1::CreateSessionRequest {
            tenant: tenant.to_owned(),
            ..Default::default()
        };
        let by_v1 = ann.create_session(create).await;
        let create = sandbox_v1::CreateSessionRequest {
            tenant_id: tenant.to_owned(),
            ..Default::default()
        };
        let by_sandbox_v1 = k8e.create_session(create).await;
        let Some(made) = made else {
            for refused in [by_v1.unwrap_err(), by_sandbox_v1.unwrap_err()] {
                assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
                let says = "may not use tenant c, only a, b";
                assert!(refused.message().contains(says), "{refused}");
            }
            continue;
        };
        let ids = [
            by_v1.unwrap().into_inner().session_id,
            by_sandbox_v1.unwrap().into_inner().session_id,
        ];
        for session_id in ids {
            let get = v1::GetSessionRequest { session_id };
            let session = ann.get_session(get).await.unwrap().into_inner();
            assert_eq!(session.tenant, made);
        }
    }
    let list = v1::ListSessionsRequest {
        tenant: "c".to_owned(),
        ..Default::default()
    };
    let refused = ann.list_sessions(list).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
}
