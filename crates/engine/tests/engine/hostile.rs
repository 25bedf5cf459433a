//! Guests that break every rule: the engine ends in a clear error, never in a panic or a hang.

use super::run::{exec_script, started};
use super::*;
use bytes::Bytes;
use k8e_engine::{FileRange, ListOptions, WriteOptions};
use k8e_model::{GuestPath, TimeLimit};
use k8e_testkit::{Script, Step, frame, hello};
use k8e_wire::proto::{self, Done, Exited, reply, request};

async fn with(steps: Vec<Step>) -> Server {
    let server = Server::with(Config::default(), FakeDriver::scripted(exec_script(steps))).await;
    server.create("a").await;
    server
}

fn stdout(bytes: usize) -> reply::Reply {
    reply::Reply::Stdout(Bytes::from(vec![b'x'; bytes]))
}

fn info(path: &str) -> reply::Reply {
    let info = proto::FileInfo {
        path: Bytes::copy_from_slice(path.as_bytes()),
        r#type: proto::FileType::File.into(),
        ..proto::FileInfo::default()
    };
    reply::Reply::File(info)
}

fn exited(exit_code: i32) -> Step {
    Step::Reply(reply::Reply::Exited(Exited {
        exit_code,
        ..Exited::default()
    }))
}

async fn run(server: &Server) -> Result<(Vec<u8>, Outcome), Error> {
    server.run("a", "true").await
}

#[tokio::test]
async fn nonsense_instead_of_a_run() {
    let huge = vec![0xff, 0xff, 0xff, 0xff, 1, 2, 3];
    let undecodable = vec![0, 0, 0, 3, 0xff, 0xff, 0xff];
    let half = frame(stdout(100))[..50].to_vec();
    let empty_message = vec![0, 0, 0, 0];
    for (name, steps) in [
        (
            "garbage",
            vec![Step::Raw(b"HTTP/1.1 200 OK\r\n\r\n".to_vec())],
        ),
        ("a huge frame", vec![Step::Raw(huge.clone())]),
        ("an undecodable frame", vec![Step::Raw(undecodable.clone())]),
        ("an empty message", vec![Step::Raw(empty_message.clone())]),
        ("closing at once", vec![]),
        ("another answer", vec![Step::Reply(hello())]),
        ("output before the start", vec![Step::Reply(stdout(1))]),
        ("an end before the start", vec![exited(0)]),
        (
            "a pid that cannot be",
            vec![Step::Reply(reply::Reply::Started(proto::Started {
                pid: -1,
            }))],
        ),
        (
            "an error of no kind",
            vec![Step::Reply(reply::Reply::Error(proto::Error::default()))],
        ),
        ("a huge frame later", vec![started(), Step::Raw(huge)]),
        (
            "an undecodable frame later",
            vec![started(), Step::Raw(undecodable)],
        ),
        ("half a frame", vec![started(), Step::Raw(half)]),
        ("closing later", vec![started(), Step::Reply(stdout(1))]),
        ("starting twice", vec![started(), started()]),
        (
            "a listing in a run",
            vec![started(), Step::Reply(reply::Reply::Done(Done::default()))],
        ),
        ("an exit code that cannot be", vec![started(), exited(-7)]),
    ] {
        let server = with(steps).await;
        let Err(error) = run(&server).await else {
            panic!("{name} was taken")
        };
        assert_eq!(error.code(), Code::Unavailable, "{name}: {error}");
        assert!(
            error
                .to_string()
                .starts_with("the sandbox's agent misbehaved: "),
            "{name}: {error}"
        );
        // The session can still be inspected and destroyed.
        server.sessions.destroy(&me(), &sid("a")).await.unwrap();
        server.no_sandbox().await;
    }
}

/// Rate limit of one sandbox's frames: per second; the burst is a quarter.
const SMALL_PIECES_PER_SECOND: f64 = 5000.0;

#[tokio::test]
async fn small_frames_are_rate_limited() {
    let server = with(vec![started(), Step::Flood(stdout(1))]).await;
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command: sh("true"),
    };
    // Two concurrent runs: the rate limit is per sandbox.
    let mut one = server.sessions.run(&me(), request.clone()).await.unwrap();
    let mut two = server.sessions.run(&me(), request).await.unwrap();
    let (began, mut pieces) = (std::time::Instant::now(), 0_u32);
    while began.elapsed() < Duration::from_secs(2) {
        tokio::select! {
            event = one.next() => drop(event.unwrap().unwrap()),
            event = two.next() => drop(event.unwrap().unwrap()),
        }
        pieces += 1;
    }
    let most = SMALL_PIECES_PER_SECOND * (began.elapsed().as_secs_f64() + 0.25);
    assert!(f64::from(pieces) < most, "{pieces} pieces");
    assert!(pieces > 100, "{pieces} pieces: nothing is read");
}

#[tokio::test]
async fn more_output_than_asked_for() {
    let server = with(vec![started(), Step::Flood(stdout(1000))]).await;
    let mut command = sh("true");
    command.output_bytes_max = Some(5000);
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let result = finish(server.sessions.run(&me(), request).await.unwrap()).await;
    refused(result, Code::Unavailable, "more output than was asked for");
}

/// The clock is paused but for jumps: every wait for a guest reaches its timeout at once.
async fn impatient<T>(future: impl Future<Output = T>) -> T {
    tokio::time::pause();
    let result = future.await;
    tokio::time::resume();
    result
}

#[tokio::test]
async fn silence_before_the_start() {
    let server = with(vec![Step::Stall]).await;
    refused(
        impatient(run(&server)).await,
        Code::Unavailable,
        "did not answer in time",
    );
}

#[tokio::test]
async fn a_run_that_does_not_end_in_time_ends_the_session() {
    let server = with(vec![started(), Step::Reply(stdout(3)), Step::Stall]).await;
    let mut command = sh("true");
    command.timeout = TimeLimit::After(Duration::from_secs(1));
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let mut run = server.sessions.run(&me(), request).await.unwrap();
    assert!(matches!(
        run.next().await,
        Some(Ok(RunEvent::Started { .. }))
    ));
    assert!(matches!(run.next().await, Some(Ok(RunEvent::Stdout(_)))));
    let error = impatient(async { run.next().await.unwrap().unwrap_err() }).await;
    assert_eq!(error.code(), Code::Unavailable);
    assert!(
        error
            .to_string()
            .contains("did not end a command after its timeout"),
        "{error}"
    );
    assert!(server.ended("a").await.contains("unresponsive"));
    assert!(
        server
            .kinds("a")
            .await
            .contains(&"guest_unresponsive".to_owned())
    );
    server.no_sandbox().await;
}

#[tokio::test]
async fn output_that_never_ends_after_the_time_is_over() {
    let server = with(vec![started(), Step::Flood(stdout(100_000))]).await;
    let mut command = sh("true");
    command.timeout = TimeLimit::After(Duration::from_secs(1));
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let run = server.sessions.run(&me(), request).await.unwrap();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(20)).await;
    tokio::time::resume();
    refused(finish(run).await, Code::Unavailable, "kept sending output");
    assert!(server.ended("a").await.contains("unresponsive"));
}

/// A slow reader does not make the guest count as unresponsive.
#[tokio::test]
async fn a_slow_reader_costs_no_session() {
    let server = with(vec![started(), Step::Reply(stdout(100_000)), exited(0)]).await;
    let mut command = sh("true");
    command.timeout = TimeLimit::After(Duration::from_secs(1));
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let run = server.sessions.run(&me(), request).await.unwrap();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3600)).await;
    tokio::time::resume();
    assert_eq!(finish(run).await.unwrap().0.len(), 100_000);
}

#[tokio::test]
async fn a_failed_guest_handshake_fails_the_creation() {
    for steps in [
        vec![],
        vec![Step::Raw(b"garbage!".to_vec())],
        vec![started()],
    ] {
        let script: Script = Arc::new(move |_: &request::Call| Some(steps.clone()));
        let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
        refused(
            server.sessions.create(&me(), spec("a")).await,
            Code::Unavailable,
            "its agent did not answer",
        );
        assert!(server.driver.sandboxes().is_empty());
        assert_eq!(server.sessions.status().active, 0);
    }
}

#[tokio::test]
async fn replies_of_file_calls_are_validated() {
    let path = GuestPath::parse(b"f").unwrap();
    let data = |bytes: usize| Step::Reply(reply::Reply::Data(Bytes::from(vec![0; bytes])));
    let done = |bytes| {
        Step::Reply(reply::Reply::Done(Done {
            bytes,
            truncated: false,
        }))
    };
    for (name, steps) in [
        ("outside", vec![Step::Reply(info("/etc/passwd"))]),
        ("beside", vec![Step::Reply(info("/workspaces/f"))]),
        ("up", vec![Step::Reply(info("/workspace/../f"))]),
        (
            "more than asked",
            vec![Step::Reply(info("/workspace/f")), data(11)],
        ),
        ("no end", vec![Step::Reply(info("/workspace/f")), data(5)]),
        (
            "something else",
            vec![Step::Reply(info("/workspace/f")), started()],
        ),
        ("nothing", vec![]),
    ] {
        let server = with(steps).await;
        let read = async {
            let mut reader = server
                .sessions
                .read_file(
                    &me(),
                    &sid("a"),
                    &path,
                    FileRange {
                        offset: 0,
                        length: 10,
                    },
                )
                .await?;
            while reader.next().await?.is_some() {}
            Ok::<_, Error>(())
        };
        let Err(error) = read.await else {
            panic!("{name} was taken")
        };
        assert!(error.to_string().contains("misbehaved"), "{name}: {error}");
    }

    let server = with(vec![done(7), Step::Stall]).await;
    let write = server
        .sessions
        .write_file(&me(), &sid("a"), &path, WriteOptions::default())
        .await
        .unwrap();
    refused(
        write.finish().await,
        Code::Unavailable,
        "the sandbox's agent misbehaved",
    );

    let bad_list = proto::FileList {
        files: vec![proto::FileInfo::default()],
    };
    let server = with(vec![Step::Reply(reply::Reply::Files(bad_list))]).await;
    let mut list = server
        .sessions
        .list_files(&me(), &sid("a"), &path, ListOptions::default())
        .await
        .unwrap();
    refused(
        list.next().await,
        Code::Unavailable,
        "outside the directory",
    );

    let server = with(vec![Step::Flood(reply::Reply::Processes(
        proto::ProcessList {
            processes: vec![proto::Process::default(); 1000],
        },
    ))])
    .await;
    refused(
        server.sessions.processes(&me(), &sid("a")).await,
        Code::Unavailable,
        "more processes than there can be",
    );

    let nothing = reply::Reply::Files(proto::FileList::default());
    let server = with(vec![Step::Flood(nothing)]).await;
    let mut list = server
        .sessions
        .list_files(&me(), &sid("a"), &path, ListOptions::default())
        .await
        .unwrap();
    refused(list.next().await, Code::Unavailable, "empty replies");

    let server = with(vec![Step::Stall]).await;
    refused(
        impatient(server.sessions.stat(&me(), &sid("a"), &path)).await,
        Code::Unavailable,
        "did not answer in time",
    );
}

#[tokio::test]
async fn messages_of_a_guest_are_sanitized() {
    let message = format!("\x1b[31mred\n{}", "x".repeat(100_000));
    let error = proto::Error {
        code: proto::ErrorCode::IsDirectory.into(),
        message,
    };
    let server = with(vec![Step::Reply(reply::Reply::Error(error))]).await;
    let path = GuestPath::parse(b"dir").unwrap();
    let error = server
        .sessions
        .read_file(&me(), &sid("a"), &path, FileRange::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Precondition);
    let text = error.to_string();
    assert!(
        text.starts_with("read /workspace/dir: ") && text.contains("[31mred x"),
        "{text}"
    );
    assert!(text.len() < 1000 && !text.contains('\x1b') && !text.contains('\n'));
}

#[tokio::test]
async fn a_write_refused_half_way_returns_the_error() {
    let full = proto::Error {
        code: proto::ErrorCode::Exhausted.into(),
        message: "no space left".to_owned(),
    };
    let server = with(vec![Step::Reply(reply::Reply::Error(full))]).await;
    let path = GuestPath::parse(b"f").unwrap();
    let mut writer = server
        .sessions
        .write_file(&me(), &sid("a"), &path, WriteOptions::default())
        .await
        .unwrap();
    let write = async {
        for _ in 0..1000 {
            writer.write(Bytes::from(vec![0; 1 << 20])).await?;
        }
        Ok::<_, Error>(())
    };
    refused(
        write.await,
        Code::Exhausted,
        "write /workspace/f: no space left",
    );
}

fn processes(count: usize, bytes: usize) -> reply::Reply {
    let text = Bytes::from(vec![b'x'; bytes]);
    let process = proto::Process {
        comm: text.clone(),
        cmdline: text,
        ..proto::Process::default()
    };
    reply::Reply::Processes(proto::ProcessList {
        processes: vec![process; count],
    })
}

/// Names are copied out of a guest's message: a slice would keep half a megabyte alive for each.
#[tokio::test]
async fn a_listing_in_memory_is_small() {
    let done = Step::Reply(reply::Reply::Done(Done::default()));
    let mut steps = vec![Step::Reply(processes(1, 200_000)); 3];
    steps.push(done.clone());
    let server = with(steps).await;
    let list = server.sessions.processes(&me(), &sid("a")).await.unwrap();
    assert_eq!(list.len(), 3);
    for process in &list {
        assert_eq!((process.comm.len(), process.cmdline.len()), (64, 4096));
        assert!(process.comm.is_unique() && process.cmdline.is_unique());
    }

    // The most entries, each of maximum length.
    let mut steps = vec![Step::Reply(processes(32, 4096)); 4096 / 32];
    steps.push(done.clone());
    let server = with(steps).await;
    let list = server.sessions.processes(&me(), &sid("a")).await.unwrap();
    assert_eq!(list.len(), 4096);
    let held = |process: &k8e_engine::Process| process.comm.len() + process.cmdline.len();
    assert_eq!(list.iter().map(held).sum::<usize>(), 8 << 20);

    let reply::Reply::File(file) = info("/workspace/f") else {
        unreachable!()
    };
    let files = reply::Reply::Files(proto::FileList {
        files: vec![file; 3],
    });
    let server = with(vec![Step::Reply(files), done]).await;
    let path = GuestPath::parse(b"f").unwrap();
    let mut list = server
        .sessions
        .list_files(&me(), &sid("a"), &path, ListOptions::default())
        .await
        .unwrap();
    for file in list.next().await.unwrap().unwrap() {
        assert!(file.path.is_unique());
    }
}

/// Each reply comes in time, but there is no end to them.
#[tokio::test]
async fn a_listing_that_trickles_times_out() {
    let trickle = |reply: reply::Reply| {
        let steps = [Step::Reply(reply), Step::Pause(Duration::from_millis(20))];
        steps.into_iter().cycle().take(400).collect::<Vec<_>>()
    };
    // The paused clock advances 12 s per 100 ms of real time, which the guest runs on.
    let faster = async {
        tokio::time::pause();
        loop {
            let real = || std::thread::sleep(Duration::from_millis(100));
            tokio::task::spawn_blocking(real).await.unwrap();
            tokio::time::advance(Duration::from_secs(12)).await;
        }
    };
    let server = with(trickle(processes(1, 1))).await;
    let (who, id) = (me(), sid("a"));
    let listed = tokio::select! {
        listed = server.sessions.processes(&who, &id) => listed,
        () = faster => unreachable!(),
    };
    tokio::time::resume();
    refused(
        listed,
        Code::Unavailable,
        "did not finish a listing in time",
    );
}
