//! Terminals (PTY).

use super::*;
use bytes::Bytes;
use k8e_engine::{TerminalEvent, TerminalRequest, TerminalStream, TerminalView};
use k8e_model::TerminalId;
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{self, Exited, TerminalState, reply, request};

impl Server {
    async fn make_terminal(&self, id: &str, command: Command) -> Result<TerminalView, Error> {
        let request = TerminalRequest {
            target: RunTarget::Existing(sid(id)),
            command,
            rows: 0,
            cols: 101,
        };
        let (view, created) = self.sessions.create_terminal(&me(), request).await?;
        assert!(!created);
        Ok(view)
    }

    async fn terminal(&self, id: &str, script: &str) -> TerminalId {
        self.make_terminal(id, sh(script)).await.unwrap().id
    }

    async fn attach(&self, id: &TerminalId) -> TerminalStream {
        self.sessions.attach_terminal(&me(), id).await.unwrap()
    }

    async fn type_in(&self, id: &TerminalId, data: &'static [u8]) -> Result<(), Error> {
        let data = Bytes::from_static(data);
        self.sessions.write_terminal(&me(), id, data).await
    }
}

/// Reads output up to the exit, or to that text.
async fn read(stream: &mut TerminalStream, text: &str) -> (String, Option<i32>) {
    let mut said = Vec::new();
    let all = async {
        loop {
            match stream.next().await.unwrap().unwrap() {
                TerminalEvent::Data(data) => said.extend_from_slice(&data),
                TerminalEvent::Exited(exit) => break Some(exit.exit_code),
            }
            if !text.is_empty() && String::from_utf8_lossy(&said).contains(text) {
                break None;
            }
        }
    };
    let exit = tokio::time::timeout(PATIENCE, all).await.expect("it says");
    (String::from_utf8_lossy(&said).into_owned(), exit)
}

#[tokio::test]
async fn a_terminal_is_created_read_written_and_exits() {
    let server = Server::start().await;
    server.create("a").await;
    let view = server.make_terminal("a", sh("stty size; read x; echo got-$x; exit 3"));
    let view = view.await.unwrap();
    assert!(view.pid > 0 && view.id.as_str().starts_with("term-"));
    assert_eq!((view.rows, view.cols, &*view.program), (24, 101, "sh"));
    let mut stream = server.attach(&view.id).await;
    read(&mut stream, "24 101\r\n").await;
    let size = (40, 50);
    let resized = server.sessions.resize_terminal(&me(), &view.id, size).await;
    resized.unwrap();
    let listed = server.sessions.list_terminals(&me(), &sid("a")).await;
    let listed = listed.unwrap();
    assert_eq!(
        (listed.len(), listed[0].rows, listed[0].exited),
        (1, 40, None)
    );
    let foreground = server.sessions.terminal_foreground(&me(), &view.id).await;
    assert_eq!(foreground.unwrap().group, view.pid);
    server.type_in(&view.id, b"x\n").await.unwrap();
    let (said, exit) = read(&mut stream, "").await;
    assert!(said.contains("got-x\r\n"), "{said}");
    assert_eq!(exit, Some(3));
    assert!(stream.next().await.is_none());
    // The exit is kept for a late reader.
    let mut late = server.attach(&view.id).await;
    assert_eq!(read(&mut late, "").await.1, Some(3));
    refused(
        server.type_in(&view.id, b"x").await,
        Code::Precondition,
        "has ended",
    );
    let kinds = server.kinds("a").await;
    assert!(kinds.contains(&"terminal_created".to_owned()), "{kinds:?}");
    let log = server.sessions.transcript(&me(), &sid("a"), 0, 100).await;
    assert_eq!(
        log.unwrap().output,
        b"",
        "what is typed is in no transcript"
    );
}

#[tokio::test]
async fn a_terminal_is_signalled_and_destroyed() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server.terminal(
        "a",
        "trap 'echo caught' USR1; echo up; while :; do sleep 0.02; done",
    );
    let id = id.await;
    let mut stream = server.attach(&id).await;
    read(&mut stream, "up").await;
    let group = server.sessions.signal_terminal(&me(), &id, 10).await;
    assert!(group.unwrap() > 0);
    read(&mut stream, "caught").await;
    refused(
        server.sessions.signal_terminal(&me(), &id, 0).await,
        Code::Invalid,
        "signal 0",
    );
    let grace = Some(Duration::from_millis(200));
    let destroyed = server.sessions.destroy_terminal(&me(), &id, grace).await;
    destroyed.unwrap();
    assert_eq!(read(&mut stream, "").await.1, Some(143));
    refused(
        server.sessions.attach_terminal(&me(), &id).await.map(drop),
        Code::NotFound,
        "not found",
    );
    assert!(server.store.terminals().await.unwrap().is_empty());
}

#[tokio::test]
async fn terminals_of_other_owners_are_not_found() {
    let server = Server::start().await;
    server.create("a").await;
    let own = server.terminal("a", "sleep 60").await;
    for id in [&own, &TerminalId::random()] {
        let (sessions, other) = (&server.sessions, other());
        let results = [
            sessions.attach_terminal(&other, id).await.map(drop),
            sessions.write_terminal(&other, id, "x".into()).await,
            sessions.resize_terminal(&other, id, (1, 1)).await,
            sessions.terminal_foreground(&other, id).await.map(drop),
            sessions.signal_terminal(&other, id, 9).await.map(drop),
            sessions.destroy_terminal(&other, id, None).await,
        ];
        for result in results {
            refused(result, Code::NotFound, "not found");
        }
    }
    let listed = server.sessions.list_terminals(&other(), &sid("a")).await;
    refused(listed, Code::NotFound, "not found");
    let foreground = server.sessions.terminal_foreground(&me(), &own).await;
    assert!(foreground.unwrap().group > 0, "it is alive");
}

#[tokio::test]
async fn terminals_are_limited_and_exited_ones_are_evicted() {
    let config = Config {
        terminals_max: 66,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server.create("a").await;
    server.create("b").await;
    let short = server.terminal("a", "exit 1").await;
    read(&mut server.attach(&short).await, "").await;
    for _ in 0..63 {
        server.terminal("a", "sleep 60").await;
    }
    // The exited one is evicted.
    server.terminal("a", "sleep 60").await;
    refused(
        server
            .sessions
            .attach_terminal(&me(), &short)
            .await
            .map(drop),
        Code::NotFound,
        "not found",
    );
    let more = server.make_terminal("a", sh("true")).await;
    refused(more, Code::Exhausted, "64 terminals");
    server.terminal("b", "sleep 60").await;
    server.terminal("b", "sleep 60").await;
    let more = server.make_terminal("b", sh("true")).await;
    refused(more, Code::Exhausted, "66 terminals");
    // A session's end frees its own.
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    server.terminal("b", "sleep 60").await;
    assert_eq!(server.store.terminals().await.unwrap().len(), 3);
}

#[tokio::test]
async fn terminals_survive_a_restart_and_not_their_session() {
    let server = Server::start().await;
    server.create("a").await;
    let id = server
        .terminal("a", "echo up; read x; echo got-$x; sleep 60")
        .await;
    read(&mut server.attach(&id).await, "up").await;
    let server = server.restart().await;
    let mut stream = server.attach(&id).await;
    read(&mut stream, "up").await;
    server.type_in(&id, b"there\n").await.unwrap();
    read(&mut stream, "got-there").await;
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let end = loop {
        match stream.next().await.unwrap() {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    refused(server.type_in(&id, b"x").await, Code::NotFound, "not found");
}

#[tokio::test]
async fn a_failed_start_leaves_nothing() {
    let server = Server::start().await;
    server.create("a").await;
    let missing = server.make_terminal("a", argv(&["no-such-program"])).await;
    refused(missing, Code::Invalid, "no-such-program");
    assert!(server.store.terminals().await.unwrap().is_empty());
    let listed = server.sessions.list_terminals(&me(), &sid("a")).await;
    assert_eq!(listed.unwrap(), []);
}

#[tokio::test]
async fn a_hostile_guest_fails_only_its_own_calls() {
    let started = || Step::Reply(reply::Reply::Started(proto::Started { pid: 7 }));
    let exited = |exit_code| {
        reply::Reply::Exited(Exited {
            exit_code,
            ..Exited::default()
        })
    };
    let empty = reply::Reply::Data(Bytes::new());
    for last in [
        vec![started(), Step::Reply(exited(4711))],
        vec![started(), Step::Flood(empty)],
        vec![started(), started()],
        vec![started()],
        vec![Step::Reply(exited(0))],
        vec![Step::Raw(vec![0xff; 64])],
    ] {
        let script: Script = Arc::new(move |call: &request::Call| match call {
            request::Call::CreateTerminal(_) => Some(vec![started()]),
            request::Call::Hello(_) => None,
            request::Call::InspectTerminal(_) => {
                let state = TerminalState {
                    foreground: -7,
                    ..TerminalState::default()
                };
                Some(vec![Step::Reply(reply::Reply::Terminal(state))])
            }
            _ => Some(last.clone()),
        });
        let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
        server.create("a").await;
        let id = server.terminal("a", "true").await;
        let sessions = &server.sessions;
        let all = async {
            if let Ok(mut stream) = sessions.attach_terminal(&me(), &id).await {
                while let Some(event) = stream.next().await {
                    assert!(!matches!(event, Ok(TerminalEvent::Exited(_))));
                }
            }
            assert!(sessions.terminal_foreground(&me(), &id).await.is_err());
            assert!(
                sessions
                    .write_terminal(&me(), &id, "x".into())
                    .await
                    .is_err()
            );
            assert!(sessions.signal_terminal(&me(), &id, 9).await.is_err());
            assert!(sessions.list_terminals(&me(), &sid("a")).await.is_err());
        };
        tokio::time::timeout(PATIENCE, all).await.expect("in time");
    }
}
