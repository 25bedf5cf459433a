//! Background runs over gRPC.

use crate::server::{SOON, TestServer};
use k8e_api::client::Client;
use k8e_api::v1::{self, run_start::Program, watch_run_response::Event};
use tonic::Code;

fn bash(code: &str) -> v1::RunStart {
    let code = v1::Code {
        language: "bash".into(),
        code: code.to_owned().into(),
    };
    // Guests of tests run on this machine, where there is no workspace.
    v1::RunStart {
        program: Some(Program::Code(code)),
        cwd: "/".into(),
        ..Default::default()
    }
}

async fn watch(client: &mut Client, run_id: &str) -> (Vec<u8>, v1::BackgroundRun) {
    let request = v1::WatchRunRequest {
        run_id: run_id.to_owned(),
    };
    let mut events = client.watch_run(request).await.unwrap().into_inner();
    let mut output = Vec::new();
    let all = async {
        loop {
            match events.message().await.unwrap().unwrap().event.unwrap() {
                Event::Stdout(data) | Event::Stderr(data) => output.extend_from_slice(&data),
                Event::Ended(run) => return run,
            }
        }
    };
    let run = tokio::time::timeout(SOON, all).await.unwrap();
    (output, run)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_started_watched_listed_and_cancelled() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let begun = client.start_run(bash("printf '\\377'; sleep 0.1; exit 3"));
    let begun = begun.await.unwrap().into_inner();
    assert_eq!(begun.status, "running");
    assert!(begun.session_created && begun.run_id.starts_with("run-"));
    // Another connection: the first is not needed.
    drop(client);
    let mut client = server.local().await;
    let (output, ended) = watch(&mut client, &begun.run_id).await;
    assert_eq!((&*output, ended.exit_code), (&b"\xff"[..], 3));
    let run_id = begun.run_id.clone();
    let got = client.get_run(v1::GetRunRequest { run_id }).await.unwrap();
    let got = got.into_inner();
    assert_eq!((&*got.stdout, &*got.status), (&b"\xff"[..], "completed"));
    assert_eq!((&*got.program, got.session_created), ("bash", false));

    let start = v1::RunStart {
        session_id: begun.session_id.clone(),
        ..bash("sleep 60")
    };
    let long = client.start_run(start).await.unwrap().into_inner();
    let session_id = begun.session_id.clone();
    let request = v1::GetSessionRequest { session_id };
    let session = client.get_session(request).await.unwrap().into_inner();
    assert_eq!(session.background_runs, 1);
    let run_id = long.run_id.clone();
    let cancelled = client.cancel_run(v1::CancelRunRequest { run_id }).await;
    assert_eq!(cancelled.unwrap().into_inner().status, "cancelled");
    let session_id = begun.session_id.clone();
    let listed = client.list_runs(v1::ListRunsRequest { session_id }).await;
    let listed = listed.unwrap().into_inner().runs;
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|run| run.stdout.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_and_other_peoples_runs_are_refused() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let begun = client.start_run(bash("sleep 60")).await.unwrap();
    let run_id = begun.into_inner().run_id;
    for start in [
        v1::RunStart {
            stdin: true,
            ..bash("cat")
        },
        v1::RunStart {
            fresh: true,
            ..bash("true")
        },
        v1::RunStart::default(),
    ] {
        let refused = client.start_run(start).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    }
    let nonsense = v1::GetRunRequest {
        run_id: "../x".into(),
    };
    let refused = client.get_run(nonsense).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    for run_id in [run_id.clone(), "run-of-nobody".to_owned()] {
        let get = v1::GetRunRequest {
            run_id: run_id.clone(),
        };
        let cancel = v1::CancelRunRequest {
            run_id: run_id.clone(),
        };
        let watch = v1::WatchRunRequest { run_id };
        let codes = [
            admin.get_run(get).await.unwrap_err().code(),
            admin.cancel_run(cancel).await.unwrap_err().code(),
            admin.watch_run(watch).await.unwrap_err().code(),
        ];
        assert_eq!(codes, [Code::NotFound; 3]);
    }
    let request = v1::CancelRunRequest { run_id };
    client.cancel_run(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watching_client_does_not_delay_a_stop() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let begun = client.start_run(bash("sleep 60")).await.unwrap();
    let request = v1::WatchRunRequest {
        run_id: begun.into_inner().run_id,
    };
    let mut events = client.watch_run(request).await.unwrap().into_inner();
    let begun = std::time::Instant::now();
    server.stop().await.unwrap();
    assert!(begun.elapsed() < std::time::Duration::from_secs(4));
    let end = tokio::time::timeout(SOON, events.message()).await.unwrap();
    assert_eq!(end.unwrap_err().code(), Code::Unavailable);
}
