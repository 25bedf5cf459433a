//! Kept commands, access tokens, and changes of the TTL: what E2B's clients need of the engine.

use super::*;
use bytes::Bytes;
use k8e_engine::{CommandConfig, CommandEvent, CommandInput, CommandStart, CommandStream};
use k8e_model::{ClientKind, Code, TimeLimit};

impl Server {
    async fn command(&self, id: &str, script: &str) -> CommandStream {
        let start = CommandStart {
            session: sid(id),
            command: Command {
                timeout: TimeLimit::Never,
                stdin: true,
                ..sh(script)
            },
            terminal: None,
            config: CommandConfig {
                cmd: script.to_owned(),
                tag: Some("tagged".to_owned()),
                ..CommandConfig::default()
            },
        };
        self.sessions.start_command(&me(), start).await.unwrap()
    }
}

/// Standard output to the end, exit code and signal.
async fn ended(mut stream: CommandStream) -> (String, i32, i32) {
    let mut out = Vec::new();
    let events = async {
        loop {
            match stream.next().await.expect("an exit comes before the end") {
                CommandEvent::Stdout(data) => out.extend_from_slice(&data),
                CommandEvent::Exited(exit) => break exit,
                other => panic!("{other:?}"),
            }
        }
    };
    let exit = tokio::time::timeout(PATIENCE, events).await.unwrap();
    let out = String::from_utf8(out).unwrap();
    (out, exit.exit_code, exit.signal)
}

#[tokio::test]
async fn a_command_takes_input_and_outlives_its_readers() {
    let server = Server::start().await;
    server.create("a").await;
    let (who, id) = (&me(), &sid("a"));
    let first = server
        .command("a", "read line; echo got $line; exit 3")
        .await;
    let pid = first.pid;
    drop(first);
    let sessions = &server.sessions;
    let listed = sessions.list_commands(who, id).await.unwrap();
    assert_eq!(
        listed.iter().map(|view| view.pid).collect::<Vec<_>>(),
        [pid]
    );
    assert_eq!(
        sessions.command_by_tag(who, id, "tagged").await.unwrap(),
        pid
    );
    let second = sessions.connect_command(who, id, pid).await.unwrap();
    let typed = CommandInput::Stdin(Bytes::from_static(b"this\n"));
    sessions
        .send_command_input(who, id, pid, typed)
        .await
        .unwrap();
    assert_eq!(ended(second).await, ("got this\n".to_owned(), 3, 0));
    // Its exit is kept for a while, without its output; it takes nothing any more.
    let late = sessions.connect_command(who, id, pid).await.unwrap();
    assert_eq!(ended(late).await, (String::new(), 3, 0));
    assert!(sessions.list_commands(who, id).await.unwrap().is_empty());
    let refused = sessions.signal_command(who, id, pid, 9).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
}

#[tokio::test]
async fn a_command_is_killed_and_its_input_closed() {
    let server = Server::start().await;
    server.create("a").await;
    let (who, id, sessions) = (&me(), &sid("a"), &server.sessions);
    let cat = server.command("a", "cat").await;
    sessions
        .close_command_input(who, id, cat.pid)
        .await
        .unwrap();
    assert_eq!(ended(cat).await, (String::new(), 0, 0));
    let sleeper = server.command("a", "exec sleep 1000").await;
    sessions
        .signal_command(who, id, sleeper.pid, 9)
        .await
        .unwrap();
    assert_eq!(ended(sleeper).await, (String::new(), 137, 9));
    let resized = sessions.resize_command(who, id, 999_999, (1, 1)).await;
    assert_eq!(resized.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_token_opens_one_session_of_one_kind_of_client() {
    let server = Server::start().await;
    server.create("a").await;
    server.create("b").await;
    let sessions = &server.sessions;
    let token = sessions.access_token(&me(), &sid("a")).await.unwrap();
    let kind = ClientKind::default();
    let opens = |id: &str, kind: &ClientKind, token: &str| {
        sessions
            .verify_access_token(&sid(id), kind, token)
            .is_some()
    };
    assert!(opens("a", &kind, &token));
    assert!(!opens("b", &kind, &token) && !opens("c", &kind, &token));
    assert!(!opens("a", &ClientKind::e2b(), &token));
    assert!(!opens("a", &kind, &token[1..]) && !opens("a", &kind, ""));
    let found = sessions.find_by_token(&kind, |other| other == token);
    assert_eq!(found.map(|(id, _)| id), Some(sid("a")));
}

#[tokio::test]
async fn the_ttl_of_a_live_session_changes() {
    let server = Server::start().await;
    server.create("a").await;
    let (who, id, sessions) = (&me(), &sid("a"), &server.sessions);
    let long = sessions
        .set_ttl(who, id, Some(Duration::from_secs(5000)))
        .await
        .unwrap();
    let short = sessions
        .set_ttl(who, id, Some(Duration::from_secs(500)))
        .await
        .unwrap();
    assert!(short.expires_at < long.expires_at && short.expires_at.is_some());
    let never = sessions.set_ttl(who, id, None).await.unwrap();
    assert_eq!(never.session.lifetime.ttl, None);
    sessions
        .set_ttl(who, id, Some(Duration::from_millis(1)))
        .await
        .unwrap();
    let over = async {
        while sessions.get(who, id).await.unwrap().session.phase != Phase::Ended {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, over)
        .await
        .expect("it expires");
}
