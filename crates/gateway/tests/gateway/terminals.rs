//! Terminals (PTYs) over gRPC.

use crate::server::{SOON, TestServer};
use k8e_api::client::Client;
use k8e_api::v1::{self, terminal_event::Event};
use tonic::Code;

fn create(argv: &[&str]) -> v1::CreateTerminalRequest {
    v1::CreateTerminalRequest {
        argv: argv.iter().map(|arg| (*arg).to_owned().into()).collect(),
        // Guests of tests run on this machine, where there is no workspace.
        cwd: "/".into(),
        cols: 77,
        ..Default::default()
    }
}

async fn attach(client: &mut Client, id: &str) -> tonic::Streaming<v1::TerminalEvent> {
    let terminal_id = id.to_owned();
    let request = v1::AttachTerminalRequest { terminal_id };
    client.attach_terminal(request).await.unwrap().into_inner()
}

/// What it says up to its end, or to that text.
async fn read(
    events: &mut tonic::Streaming<v1::TerminalEvent>,
    text: &str,
) -> (Vec<u8>, Option<v1::TerminalExited>) {
    let mut said = Vec::new();
    let all = async {
        loop {
            match events.message().await.unwrap().unwrap().event.unwrap() {
                Event::Data(data) => said.extend_from_slice(&data),
                Event::Exited(exited) => break Some(exited),
            }
            if !text.is_empty() && String::from_utf8_lossy(&said).contains(text) {
                break None;
            }
        }
    };
    let exited = tokio::time::timeout(SOON, all).await.unwrap();
    (said, exited)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_works_over_grpc() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let script = "stty size; read x; printf '\\377%s\\n' $x; exit 4";
    let made = client.create_terminal(create(&["sh", "-c", script])).await;
    let made = made.unwrap().into_inner();
    assert!(made.session_created && made.pid > 0);
    assert_eq!((made.rows, made.cols, &*made.program), (24, 77, "sh"));
    let mut events = attach(&mut client, &made.terminal_id).await;
    read(&mut events, "24 77\r\n").await;
    let terminal_id = || made.terminal_id.clone();
    let resize = v1::ResizeTerminalRequest {
        terminal_id: terminal_id(),
        rows: 50,
        cols: 60,
    };
    client.resize_terminal(resize).await.unwrap();
    let foreground = v1::TerminalForegroundRequest {
        terminal_id: terminal_id(),
    };
    let foreground = client.terminal_foreground(foreground).await.unwrap();
    assert_eq!(foreground.into_inner().process_group_id, made.pid);
    let write = v1::WriteTerminalRequest {
        terminal_id: terminal_id(),
        data: "in\n".into(),
    };
    client.write_terminal(write).await.unwrap();
    let (said, exited) = read(&mut events, "").await;
    assert!(said.ends_with(b"\xffin\r\n"), "{said:?}");
    assert_eq!(exited.unwrap().exit_code, 4);
    let list = v1::ListTerminalsRequest {
        session_id: made.session_id.clone(),
    };
    let listed = client.list_terminals(list).await.unwrap().into_inner();
    assert_eq!(listed.terminals[0].exited.unwrap().exit_code, 4);
    assert_eq!(listed.terminals[0].rows, 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_and_other_peoples_terminals_are_refused() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let made = client.create_terminal(create(&["sleep", "60"])).await;
    let made = made.unwrap().into_inner();
    let large = v1::CreateTerminalRequest {
        rows: 70_000,
        ..create(&["true"])
    };
    let refused = client.create_terminal(large).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let missing = client.create_terminal(create(&["no-such-program"])).await;
    assert_eq!(missing.unwrap_err().code(), Code::InvalidArgument);

    let mut admin = server.remote(Some(&server.admin_dir())).await.unwrap();
    for id in [made.terminal_id.clone(), "term-of-nobody".to_owned()] {
        let terminal_id = || id.clone();
        let codes = [
            admin
                .attach_terminal(v1::AttachTerminalRequest {
                    terminal_id: terminal_id(),
                })
                .await
                .unwrap_err()
                .code(),
            admin
                .write_terminal(v1::WriteTerminalRequest {
                    terminal_id: terminal_id(),
                    data: "x".into(),
                })
                .await
                .unwrap_err()
                .code(),
            admin
                .resize_terminal(v1::ResizeTerminalRequest {
                    terminal_id: terminal_id(),
                    rows: 1,
                    cols: 1,
                })
                .await
                .unwrap_err()
                .code(),
            admin
                .terminal_foreground(v1::TerminalForegroundRequest {
                    terminal_id: terminal_id(),
                })
                .await
                .unwrap_err()
                .code(),
            admin
                .signal_terminal(v1::SignalTerminalRequest {
                    terminal_id: terminal_id(),
                    signal: 9,
                })
                .await
                .unwrap_err()
                .code(),
            admin
                .destroy_terminal(v1::DestroyTerminalRequest {
                    terminal_id: terminal_id(),
                    grace_ms: 0,
                })
                .await
                .unwrap_err()
                .code(),
        ];
        assert_eq!(codes, [Code::NotFound; 6]);
    }
    let signal = v1::SignalTerminalRequest {
        terminal_id: made.terminal_id.clone(),
        signal: 9,
    };
    client.signal_terminal(signal).await.unwrap();
    let mut events = attach(&mut client, &made.terminal_id).await;
    assert_eq!(read(&mut events, "").await.1.unwrap().signal, 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reading_client_does_not_delay_a_stop() {
    let server = TestServer::start().await;
    let mut client = server.local().await;
    let made = client.create_terminal(create(&["sleep", "60"])).await;
    let id = made.unwrap().into_inner().terminal_id;
    let mut events = attach(&mut client, &id).await;
    let begun = std::time::Instant::now();
    server.stop().await.unwrap();
    assert!(begun.elapsed() < std::time::Duration::from_secs(4));
    let end = tokio::time::timeout(SOON, events.message()).await.unwrap();
    assert_eq!(end.unwrap_err().code(), Code::Unavailable);
}
