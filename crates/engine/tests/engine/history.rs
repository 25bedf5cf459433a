//! Transcripts and events: write-behind recorder, retention.

use super::run::{exec_script, started};
use super::*;
use k8e_testkit::Step;
use std::io::Read as _;

#[tokio::test]
async fn a_transcript_is_what_was_written_in_order() {
    let server = Server::start().await;
    server.create("a").await;
    server.run("a", "printf one").await.unwrap();
    server.run("a", "printf two >&2").await.unwrap();
    server.run("a", "printf '\\377\\000'").await.unwrap();
    let page = server
        .sessions
        .transcript(&me(), &sid("a"), 0, 0)
        .await
        .unwrap();
    assert_eq!(page.output, b"onetwo\xff\0");
    assert!(page.eof && !page.truncated_before);
    let part = server
        .sessions
        .transcript(&me(), &sid("a"), 3, 3)
        .await
        .unwrap();
    assert_eq!(
        (part.output.as_slice(), part.next_offset, part.eof),
        (&b"two"[..], 6, false)
    );
    // It stays readable after the end and across a restart.
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let server = server.restart().await;
    assert_eq!(
        server
            .sessions
            .transcript(&me(), &sid("a"), 6, 0)
            .await
            .unwrap()
            .output,
        b"\xff\0"
    );
}

#[tokio::test]
async fn events_of_runs_are_recorded() {
    let server = Server::start().await;
    server.create("a").await;
    server.run("a", "exit 3").await.unwrap();
    let page = server
        .sessions
        .events(&me(), &sid("a"), 1, 0)
        .await
        .unwrap();
    let kinds: Vec<_> = page
        .events
        .iter()
        .map(|event| (event.seq, event.kind.as_str()))
        .collect();
    assert_eq!(kinds, [(2, "run_started"), (3, "run_ended")]);
    let detail: serde_json::Value = serde_json::from_str(&page.events[1].detail).unwrap();
    assert_eq!(
        (detail["exit_code"].as_i64(), detail["status"].as_str()),
        (Some(3), Some("completed"))
    );
    let started: serde_json::Value = serde_json::from_str(&page.events[0].detail).unwrap();
    assert_eq!(started["program"], "sh");
    let one = server
        .sessions
        .events(&me(), &sid("a"), 0, 1)
        .await
        .unwrap();
    assert_eq!((one.events.len(), one.truncated), (1, true));
}

/// A transcript that cannot be written costs the transcript, not the run.
#[tokio::test]
async fn a_full_disk_does_not_fail_a_run() {
    let server = Server::start().await;
    let dir = server.transcript_dir(&server.create("a").await);
    std::fs::create_dir_all(&dir).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.join("0.log")).unwrap();
    for _ in 0..3 {
        assert_eq!(server.run("a", "echo still").await.unwrap().0, b"still\n");
    }
    assert_eq!(server.kinds("a").await.len(), 7);
}

/// Waiting for a silent command holds no queue slot.
#[tokio::test]
async fn a_hundred_silent_runs_do_not_block_others() {
    let server = Server::start().await;
    let script = exec_script(vec![started(), Step::Stall]);
    server.driver.set_script(Some(script));
    server.create("quiet").await;
    server.driver.set_script(None);
    server.create("other").await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        let request = RunRequest {
            target: RunTarget::Existing(sid("quiet")),
            command: sh("true"),
        };
        let mut run = server.sessions.run(&me(), request).await.unwrap();
        silent.push(tokio::spawn(async move {
            run.next().await;
            run.next().await
        }));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let soon = Duration::from_secs(5);
    let run = tokio::time::timeout(soon, server.run("other", "echo hi"));
    assert_eq!(run.await.expect("the run ends").unwrap().0, b"hi\n");
    let (who, id) = (me(), sid("other"));
    let page = tokio::time::timeout(soon, server.sessions.transcript(&who, &id, 0, 0));
    let page = page.await.expect("the transcript is read").unwrap();
    assert_eq!(page.output, b"hi\n");
    assert!(silent.iter().all(|run| !run.is_finished()));
    let stop = tokio::time::timeout(soon, server.sessions.shutdown());
    stop.await.expect("the server stops");
    for run in silent {
        let told = tokio::time::timeout(soon, run).await;
        let told = told.expect("who waits is told").unwrap();
        refused(told.unwrap(), Code::Unavailable, "stopping");
    }
}

/// Dropping a future of `next` loses no output, wherever it waits.
#[tokio::test]
async fn no_output_is_lost_when_next_is_cancelled() {
    let server = Server::start().await;
    server.create("a").await;
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command: sh("for n in $(seq 200); do echo $n; done"),
    };
    let mut run = server.sessions.run(&me(), request).await.unwrap();
    let mut output = Vec::new();
    loop {
        let next = tokio::time::timeout(Duration::from_micros(200), run.next()).await;
        match next {
            Err(_) | Ok(Some(Ok(RunEvent::Started { .. }))) => {}
            Ok(Some(Ok(RunEvent::Stdout(data)))) => output.extend_from_slice(&data),
            Ok(Some(Ok(RunEvent::Exited(_)))) => break,
            other => panic!("{other:?}"),
        }
    }
    let want: String = (1..=200).map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(output).unwrap(), want);
    let page = server.sessions.transcript(&me(), &sid("a"), 0, 0).await;
    assert_eq!(String::from_utf8(page.unwrap().output).unwrap(), want);
}

/// A pipe without a reader hangs like a dead disk does.
#[tokio::test]
async fn a_disk_that_hangs_costs_the_transcript_and_is_marked_in_it() {
    const BYTES: usize = 40_000_000;
    let server = Server::start().await;
    let dir = server.transcript_dir(&server.create("a").await);
    server.create("b").await;
    std::fs::create_dir_all(&dir).unwrap();
    let pipe = dir.join("0.log");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());

    let mut command = sh(&format!("head -c {BYTES} /dev/zero; cat"));
    command.stdin = true;
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command,
    };
    let mut run = server.sessions.run(&me(), request).await.unwrap();
    let mut input = run.take_input().unwrap();
    let mut bytes = 0;
    let all = async {
        while bytes < BYTES {
            if let RunEvent::Stdout(data) = run.next().await.unwrap().unwrap() {
                bytes += data.len();
            }
        }
    };
    tokio::time::timeout(PATIENCE, all)
        .await
        .expect("the run goes on");
    // Other runs are not blocked either.
    let soon = Duration::from_secs(5);
    let other = tokio::time::timeout(soon, server.run("b", "echo lost"));
    assert_eq!(other.await.expect("it ends").unwrap().0, b"lost\n");

    // The disk comes back.
    let reader = std::thread::spawn(move || {
        let mut written = Vec::new();
        let mut pipe = std::fs::File::open(pipe).unwrap();
        pipe.read_to_end(&mut written).unwrap();
        written
    });
    let events = server.sessions.events(&me(), &sid("b"), 0, 0).await;
    let ended = events.unwrap().events.pop().unwrap();
    assert!(
        ended.detail.contains("\"transcript_lost_bytes\":5"),
        "{ended:?}"
    );
    input.data(bytes::Bytes::from_static(b"end")).await.unwrap();
    input.end().await;
    finish(run).await.unwrap();
    server
        .sessions
        .transcript(&me(), &sid("b"), 0, 0)
        .await
        .unwrap();
    server.sessions.destroy(&me(), &sid("a")).await.unwrap();
    let written = tokio::task::spawn_blocking(|| reader.join().unwrap());
    let written = written.await.unwrap();
    let zeros = written.iter().take_while(|byte| **byte == 0).count();
    let tail = String::from_utf8(written[zeros..].to_vec()).unwrap();
    let missing = BYTES - zeros;
    assert!(missing > 0);
    assert_eq!(
        tail,
        format!("\n[k8e: {missing} bytes of output are missing here: the disk was too slow]\nend")
    );
}

#[tokio::test]
async fn a_run_that_does_not_start_is_recorded() {
    let server = Server::start().await;
    server.create("a").await;
    let request = RunRequest {
        target: RunTarget::Existing(sid("a")),
        command: argv(&["no-such-program"]),
    };
    server.sessions.run(&me(), request).await.err().unwrap();
    let page = server
        .sessions
        .events(&me(), &sid("a"), 0, 0)
        .await
        .unwrap();
    let failed = page.events.last().unwrap();
    assert_eq!(failed.kind, "run_failed");
    let detail: serde_json::Value = serde_json::from_str(&failed.detail).unwrap();
    let error = detail["error"].as_str().unwrap();
    assert!(error.contains("\"no-such-program\" not found"), "{error}");
}

#[tokio::test]
async fn retention_by_count_of_ended_sessions() {
    let config = Config {
        ended_max: 5,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    server
        .sessions
        .create(&other(), spec("others"))
        .await
        .unwrap();
    let destroyed = server.sessions.destroy(&other(), &sid("others")).await;
    destroyed.unwrap();
    for _ in 0..20 {
        let request = RunRequest {
            target: RunTarget::Fresh(SessionSpec::default()),
            command: sh("echo hi"),
        };
        finish(server.sessions.run(&me(), request).await.unwrap())
            .await
            .unwrap();
    }
    server.no_sandbox().await;
    let trimmed = async {
        let ended = async || {
            server
                .sessions
                .list(&me(), Default::default())
                .await
                .unwrap()
        };
        while ended().await.len() > 5 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, trimmed)
        .await
        .expect("they go");
    let transcripts = std::fs::read_dir(server.dir.path().join("transcripts"));
    assert!(transcripts.unwrap().count() <= 5);
    // The history of another owner is not evicted.
    server.sessions.get(&other(), &sid("others")).await.unwrap();
}

#[tokio::test]
async fn retention_by_size_of_transcripts() {
    let config = Config {
        ended_bytes_max: 300_000,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let run = async |command: &str| {
        let request = RunRequest {
            target: RunTarget::Fresh(SessionSpec::default()),
            command: sh(command),
        };
        finish(server.sessions.run(&me(), request).await.unwrap())
            .await
            .unwrap();
    };
    for _ in 0..10 {
        run("head -c 100000 /dev/zero").await;
    }
    let trimmed = async {
        let kept = || {
            let kept = std::fs::read_dir(server.dir.path().join("transcripts")).unwrap();
            let bytes = kept.map(|file| file.unwrap().metadata().map_or(0, |meta| meta.len()));
            bytes.sum::<u64>()
        };
        while kept() > 330_000 {
            // What was still being written at the last end is seen at the next.
            run("true").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, trimmed)
        .await
        .expect("they go");
}
