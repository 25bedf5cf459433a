//! Background runs, which outlive their connections.

use crate::support::{
    Guest, Ran, finish, marker, processes_with, sh, wait_for_processes, with_guest,
};
use k8e_wire::proto::{
    self, AttachRun, EndRun, ErrorCode, Exec, ForgetRun, StartRun, reply::Reply, request::Call,
};

async fn start(guest: &Guest, id: &str, exec: Exec) -> Result<i32, proto::Error> {
    let request = StartRun {
        id: id.to_owned(),
        exec: Some(exec),
    };
    // The connection is closed here, the run goes on.
    let mut end = guest.call(Call::StartRun(request)).await;
    match end.replies.next().await.unwrap() {
        Reply::Started(started) => Ok(started.pid),
        Reply::Error(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

async fn attach(guest: &Guest, id: &str) -> Result<Ran, proto::Error> {
    finish(guest.call(attach_call(id, false)).await).await
}

fn attach_call(id: &str, now: bool) -> Call {
    let id = id.to_owned();
    Call::AttachRun(AttachRun { id, now })
}

async fn end(guest: &Guest, id: &str) -> Result<Reply, proto::Error> {
    let id = id.to_owned();
    guest.one(Call::EndRun(EndRun { id })).await
}

async fn forget(guest: &Guest, id: &str) -> Result<Reply, proto::Error> {
    let id = id.to_owned();
    guest.one(Call::ForgetRun(ForgetRun { id })).await
}

#[test]
fn a_run_goes_on_without_its_connection_and_is_kept() {
    with_guest(async |guest| {
        let pid = start(&guest, "a", sh("echo one; sleep 0.3; echo two >&2; exit 7")).await;
        let pid = pid.unwrap();
        // Detaching changes nothing, and every reader starts at the beginning.
        drop(guest.call(attach_call("a", false)).await);
        let mut so_far = guest.call(attach_call("a", true)).await;
        let mut said = Vec::new();
        loop {
            match so_far.replies.next().await.unwrap() {
                Reply::Started(_) => {}
                Reply::Stdout(data) => said.extend_from_slice(&data),
                Reply::Done(_) => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(b"one\n".starts_with(&said));
        let (first, second) = tokio::join!(attach(&guest, "a"), attach(&guest, "a"));
        let late = attach(&guest, "a").await;
        for ran in [first.unwrap(), second.unwrap(), late.unwrap()] {
            assert_eq!((ran.pid, ran.exited.exit_code), (pid, 7));
            assert_eq!((&*ran.stdout, &*ran.stderr), (&b"one\n"[..], &b"two\n"[..]));
        }
        forget(&guest, "a").await.unwrap();
        let gone = attach(&guest, "a").await.err().unwrap();
        assert_eq!(gone.code(), ErrorCode::NotFound);
    });
}

#[test]
fn ending_a_run_ends_all_it_started() {
    with_guest(async |guest| {
        let marker = marker();
        let code = format!("echo here; (setsid sleep {marker} &); sleep {marker}");
        start(&guest, "a", sh(&code)).await.unwrap();
        wait_for_processes(&marker, 2).await;
        end(&guest, "a").await.unwrap();
        assert_eq!(processes_with(&marker), []);
        let ran = attach(&guest, "a").await.unwrap();
        assert_eq!((ran.exited.exit_code, ran.exited.signal), (137, 9));
        assert_eq!(ran.stdout, b"here\n");
        // Both calls are idempotent, and a running one can be forgotten.
        end(&guest, "a").await.unwrap();
        start(&guest, "b", sh(&format!("sleep {marker}")))
            .await
            .unwrap();
        wait_for_processes(&marker, 1).await;
        forget(&guest, "b").await.unwrap();
        assert_eq!(processes_with(&marker), []);
    });
}

#[test]
fn output_is_bounded_and_a_timeout_holds() {
    with_guest(async |guest| {
        let much = Exec {
            output_bytes_max: u64::MAX,
            ..sh("head -c 3000000 /dev/zero; echo done >&2")
        };
        start(&guest, "much", much).await.unwrap();
        let ran = attach(&guest, "much").await.unwrap();
        assert_eq!((ran.stdout.len(), &*ran.stderr), (1 << 20, &b"done\n"[..]));
        assert!(ran.exited.stdout_truncated && ran.exited.stdout_bytes == 3_000_000);
        let long = Exec {
            timeout_ms: 200,
            ..sh("sleep 60")
        };
        start(&guest, "long", long).await.unwrap();
        let ran = attach(&guest, "long").await.unwrap();
        assert!(ran.exited.timed_out && ran.exited.exit_code == 137);
    });
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    with_guest(async |guest| {
        let code = async |id: &str, exec: Exec| start(&guest, id, exec).await.unwrap_err().code();
        let missing = crate::support::argv(&["no-such-program"]);
        assert_eq!(code("a", missing).await, ErrorCode::NoProgram);
        assert_eq!(
            attach(&guest, "a").await.err().unwrap().code(),
            ErrorCode::NotFound
        );
        assert_eq!(code("", sh("true")).await, ErrorCode::Invalid);
        assert_eq!(code(&"a".repeat(65), sh("true")).await, ErrorCode::Invalid);
        let stdin = Exec {
            stdin: true,
            ..sh("cat")
        };
        assert_eq!(code("a", stdin).await, ErrorCode::Invalid);
        for n in 0..64 {
            start(&guest, &format!("n{n}"), sh("true")).await.unwrap();
        }
        assert_eq!(code("n0", sh("true")).await, ErrorCode::Exists);
        assert_eq!(code("one-more", sh("true")).await, ErrorCode::Exhausted);
        forget(&guest, "n0").await.unwrap();
        start(&guest, "one-more", sh("true")).await.unwrap();
    });
}
