//! File watching, with a scripted guest (the real one works below `/workspace`, which tests must not write to on the
//! host) and with the real one where it refuses.

use super::*;
use k8e_engine::{FileChange, FileEvent};
use k8e_model::GuestPath;
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{self, ErrorCode, FileChange as Wire, reply, request};

fn path() -> GuestPath {
    GuestPath::parse(b"dir").unwrap()
}

fn changed(change: Wire, path: &'static str, move_id: u32) -> proto::FileEvent {
    proto::FileEvent {
        change: change.into(),
        path: Bytes::from_static(path.as_bytes()),
        directory: false,
        move_id,
    }
}

fn events(events: Vec<proto::FileEvent>) -> Step {
    Step::Reply(reply::Reply::FileEvents(proto::FileEvents { events }))
}

fn watching() -> Step {
    Step::Reply(reply::Reply::Watching(proto::Watching {}))
}

/// A server whose guest does this when it is asked to watch.
async fn server(steps: Vec<Step>) -> Server {
    let script: Script = Arc::new(move |call| match call {
        request::Call::WatchFiles(asked) => {
            assert_eq!(
                (&asked.root[..], &asked.path[..], asked.recursive),
                (&b"/workspace"[..], &b"dir"[..], true)
            );
            Some(steps.clone())
        }
        _ => None,
    });
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    server
}

#[tokio::test]
async fn changes_are_passed_on_until_the_session_ends() {
    let script = vec![
        watching(),
        events(vec![
            changed(Wire::Created, "f", 0),
            changed(Wire::MovedFrom, "f", 7),
            changed(Wire::MovedTo, "sub/g", 7),
        ]),
        events(Vec::new()),
        events(vec![changed(Wire::Overflow, "", 0)]),
        Step::Stall,
    ];
    let server = server(script).await;
    let sessions = &server.sessions;
    let watch = sessions.watch_files(&me(), &sid("a"), &path(), true).await;
    let mut watch = watch.unwrap();
    let seen = |event: &FileEvent| (event.change, event.path.clone(), event.rename_id);
    let first: Vec<_> = watch.next().await.unwrap().iter().map(seen).collect();
    let expected = [
        (FileChange::Created, Bytes::from("f"), 0),
        (FileChange::RenamedFrom, Bytes::from("f"), 7),
        (FileChange::RenamedTo, Bytes::from("sub/g"), 7),
    ];
    assert_eq!(first, expected);
    let second = watch.next().await.unwrap();
    assert_eq!(second[0].change, FileChange::Overflow);
    let (who, id) = (me(), sid("a"));
    let (next, destroyed) = tokio::join!(watch.next(), sessions.destroy(&who, &id));
    destroyed.unwrap();
    assert!(matches!(next, Err(Error::SessionEnded { .. })), "{next:?}");
}

#[tokio::test]
async fn the_reason_of_the_end_is_the_guests() {
    let gone = reply::Reply::Error(proto::Error {
        code: ErrorCode::NotFound.into(),
        message: "there is no dir any more".to_owned(),
    });
    let server = server(vec![watching(), Step::Reply(gone)]).await;
    let sessions = &server.sessions;
    let watch = sessions.watch_files(&me(), &sid("a"), &path(), true).await;
    let ended = watch.unwrap().next().await.unwrap_err();
    assert_eq!(ended.code(), Code::NotFound);
    assert!(ended.to_string().contains("no dir any more"), "{ended}");
}

#[tokio::test]
async fn a_guest_that_lies_about_paths_is_not_passed_on() {
    for bad in [
        changed(Wire::Created, "../up", 0),
        changed(Wire::Created, "/etc/passwd", 0),
        changed(Wire::Created, "a//b", 0),
        changed(Wire::Created, "", 0),
        changed(Wire::Created, "a\0b", 0),
        changed(Wire::Overflow, "x", 0),
        changed(Wire::Unspecified, "x", 0),
    ] {
        let server = server(vec![watching(), events(vec![bad.clone()]), Step::Stall]).await;
        let sessions = &server.sessions;
        let watch = sessions.watch_files(&me(), &sid("a"), &path(), true).await;
        let refused = watch.unwrap().next().await;
        assert!(
            matches!(refused, Err(Error::GuestMisbehaved { .. })),
            "{bad:?}: {refused:?}"
        );
    }
    let empty = Step::Flood(reply::Reply::FileEvents(proto::FileEvents::default()));
    let server = server(vec![watching(), empty]).await;
    let sessions = &server.sessions;
    let watch = sessions.watch_files(&me(), &sid("a"), &path(), true).await;
    let refused = watch.unwrap().next().await;
    assert!(matches!(refused, Err(Error::GuestMisbehaved { .. })));
}

#[tokio::test]
async fn only_the_owner_watches_and_the_real_guest_refuses_what_is_not_there() {
    let server = Server::start().await;
    server.create("a").await;
    let sessions = &server.sessions;
    let missing = GuestPath::parse(b"no/such/directory/of/k8e-tests").unwrap();
    let refused = sessions.watch_files(&me(), &sid("a"), &missing, true).await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
    let stranger = Principal::token_holder("somebody else");
    let refused = sessions
        .watch_files(&stranger, &sid("a"), &missing, true)
        .await;
    assert!(matches!(refused, Err(Error::SessionNotFound(_))));
}
