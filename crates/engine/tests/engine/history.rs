//! Transcripts and events as their reader sees them.

use super::*;

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
async fn events_tell_of_runs() {
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
    server.create("a").await;
    std::fs::create_dir_all(server.dir.path().join("transcripts/a")).unwrap();
    std::os::unix::fs::symlink("/dev/full", server.dir.path().join("transcripts/a/0.log")).unwrap();
    for _ in 0..3 {
        assert_eq!(server.run("a", "echo still").await.unwrap().0, b"still\n");
    }
    assert_eq!(server.kinds("a").await.len(), 7);
}
