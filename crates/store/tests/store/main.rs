//! The store on a real disk.
#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test that is surprised panics"
)]

mod identity;

use k8e_model::{
    BackgroundRun, BackgroundStatus, Code, EgressPolicy, LimitKind, Phase, RuntimeKind, SandboxId,
    Session, SessionId, SessionOrigin, SessionSpec, TerminalId,
};
use k8e_store::{
    EVENTS_KEPT_MAX, NewEvent, PAGE_BYTES_MAX, SessionQuery, Store, StoreError,
    TRANSCRIPT_FILE_BYTES_MAX, TerminalRecord,
};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

async fn open(dir: &tempfile::TempDir) -> Store {
    Store::open(dir.path()).await.unwrap()
}

fn id(text: &str) -> SessionId {
    text.parse().unwrap()
}

/// The sandbox of the session of that name, unless a test says otherwise.
fn sandbox(text: &str) -> SandboxId {
    format!("sbx-{text}").parse().unwrap()
}

fn session(text: &str) -> Session {
    let spec = SessionSpec::default();
    Session {
        id: id(text),
        owner: "local".to_owned(),
        tenant: spec.tenant.unwrap_or_default(),
        origin: SessionOrigin::Create,
        client: spec.client,
        phase: Phase::Creating,
        reason: String::new(),
        runtime: RuntimeKind::Native,
        sandbox: sandbox(text),
        template: spec.template,
        env: [("A".to_owned(), "ü\n".to_owned())]
            .into_iter()
            .collect::<std::collections::BTreeMap<_, _>>()
            .try_into()
            .unwrap(),
        labels: spec.labels,
        limits: k8e_model::Limits::default(),
        lifetime: k8e_model::Lifetime {
            ttl: Some(Duration::from_millis(1500)),
            idle: None,
        },
        secrets: spec.secrets,
        egress: policy(&["example.com", "*.example.org:8443"]),
        created_at: 1,
        last_used: 2,
        sub_agent: None,
        image: None,
    }
}

fn policy(entries: &[&str]) -> EgressPolicy {
    EgressPolicy::parse(entries).unwrap()
}

fn event(session: &str, number: u64) -> NewEvent {
    let serde_json::Value::Object(detail) = serde_json::json!({ "number": number }) else {
        unreachable!()
    };
    NewEvent {
        session: id(session),
        sandbox: sandbox(session),
        at: 5,
        kind: "test",
        detail,
    }
}

#[tokio::test]
async fn a_session_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let made = session("s");
    {
        let store = open(&dir).await;
        store.insert_session(&made).await.unwrap();
        store.close().await;
    }
    let store = open(&dir).await;
    assert_eq!(store.session(&id("s")).await.unwrap(), Some(made));
    assert_eq!(store.session(&id("other")).await.unwrap(), None);
}

#[tokio::test]
async fn what_a_session_may_reach_can_change() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    for entries in [&["all"][..], &["none"], &["10.0.0.0/8:5432", "a.example"]] {
        let policy = policy(entries);
        assert!(store.set_egress(&id("s"), &policy).await.unwrap());
        let kept = store.session(&id("s")).await.unwrap().unwrap();
        assert_eq!(kept.egress, policy);
    }
    assert!(
        !store
            .set_egress(&id("t"), &EgressPolicy::All)
            .await
            .unwrap()
    );
    store
        .set_phase(&id("s"), Phase::Ended, "why", 10)
        .await
        .unwrap();
    assert!(
        !store
            .set_egress(&id("s"), &EgressPolicy::All)
            .await
            .unwrap()
    );
}

#[tokio::test]
async fn a_session_of_an_older_server_reaches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(&dir).await;
        store.insert_session(&session("s")).await.unwrap();
        store.close().await;
    }
    let pool = database(&dir).await;
    for undo in [
        "ALTER TABLE sessions DROP COLUMN egress",
        "DELETE FROM _sqlx_migrations WHERE version = 2",
    ] {
        sqlx::query(undo).execute(&pool).await.unwrap();
    }
    pool.close().await;
    let kept = open(&dir).await.session(&id("s")).await.unwrap().unwrap();
    let want = Session {
        egress: EgressPolicy::None,
        ..session("s")
    };
    assert_eq!(kept, want);
}

#[tokio::test]
async fn what_made_a_session_of_an_older_server_is_not_taken_for_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let made_by_run = Session {
        origin: SessionOrigin::Run,
        client: "cli".parse().unwrap(),
        ..session("s")
    };
    {
        let store = open(&dir).await;
        store.insert_session(&made_by_run).await.unwrap();
        let kept = store.session(&id("s")).await.unwrap().unwrap();
        assert_eq!(kept, made_by_run);
        store.close().await;
    }
    let pool = database(&dir).await;
    for undo in [
        "ALTER TABLE sessions DROP COLUMN origin",
        "ALTER TABLE sessions DROP COLUMN client",
        "DELETE FROM _sqlx_migrations WHERE version = 9",
    ] {
        sqlx::query(undo).execute(&pool).await.unwrap();
    }
    pool.close().await;
    let kept = open(&dir).await.session(&id("s")).await.unwrap().unwrap();
    assert_eq!(kept, session("s"));
}

#[tokio::test]
async fn foreground_runs_without_an_end_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for name in ["a", "b", "c"] {
        store.insert_session(&session(name)).await.unwrap();
    }
    let event = |name: &str, kind, background: bool| {
        let mut detail = serde_json::Map::new();
        if background {
            detail.insert("run_id".to_owned(), "run-x".into());
        }
        NewEvent {
            session: id(name),
            sandbox: sandbox(name),
            at: 1,
            kind,
            detail,
        }
    };
    let (started, ended) = ("run_started", "run_ended");
    let events = [
        event("a", started, false),
        event("a", started, false),
        event("a", started, true),
        event("a", ended, false),
        event("a", "paused", false),
        event("b", started, false),
        event("b", ended, false),
        event("b", started, true),
        // Its start is no longer kept.
        event("c", ended, false),
    ];
    store.append_events(&events).await.unwrap();
    let counted = store.unended_foreground_runs().await.unwrap();
    assert_eq!(counted, [(id("a"), 1)].into());
    store
        .set_phase(&id("a"), Phase::Ended, "", 2)
        .await
        .unwrap();
    assert!(store.unended_foreground_runs().await.unwrap().is_empty());
}

#[tokio::test]
async fn records_are_closed_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    for name in ["k8e.db", "k8e.db-wal", "transcripts"] {
        let mode = std::fs::metadata(dir.path().join(name))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o077, 0, "{name} has mode {mode:o}");
    }
}

#[tokio::test]
async fn phases_only_go_forward() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    assert!(
        store
            .set_phase(&id("s"), Phase::Active, "", 10)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_phase(&id("s"), Phase::Terminating, "why", 10)
            .await
            .unwrap()
    );
    assert!(
        !store
            .set_phase(&id("s"), Phase::Active, "", 10)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_phase(&id("s"), Phase::Ended, "why", 10)
            .await
            .unwrap()
    );
    assert!(
        !store
            .set_phase(&id("s"), Phase::Ended, "later", 10)
            .await
            .unwrap()
    );
    assert!(
        !store
            .set_phase(&id("none"), Phase::Ended, "", 10)
            .await
            .unwrap()
    );
    let kept = store.session(&id("s")).await.unwrap().unwrap();
    assert_eq!((kept.phase, kept.reason.as_str()), (Phase::Ended, "why"));
}

#[tokio::test]
async fn only_an_ended_session_is_replaced_and_its_history_goes() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let again = Session {
        sandbox: sandbox("again"),
        ..session("s")
    };
    store.insert_session(&session("s")).await.unwrap();
    store.append_events(&[event("s", 1)]).await.unwrap();
    store
        .append_transcript(&sandbox("s"), b"old".to_vec())
        .await
        .unwrap();
    let refused = store.insert_session(&again).await.unwrap_err();
    assert!(matches!(refused, StoreError::Exists(_)), "{refused}");
    store
        .set_phase(&id("s"), Phase::Ended, "", 10)
        .await
        .unwrap();
    store.insert_session(&again).await.unwrap();
    // What the first said last comes late, and is not the second's.
    store.append_events(&[event("s", 2)]).await.unwrap();
    assert!(
        store
            .events(&id("s"), 0, 0)
            .await
            .unwrap()
            .events
            .is_empty()
    );
    assert!(!dir.path().join("transcripts/sbx-s").exists());
}

#[tokio::test]
async fn an_ended_session_of_somebody_else_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let other = Session {
        owner: "other".to_owned(),
        sandbox: sandbox("other"),
        ..session("s")
    };
    store.insert_session(&session("s")).await.unwrap();
    let alive = store.insert_session(&other).await.unwrap_err();
    store
        .append_transcript(&sandbox("s"), b"secret".to_vec())
        .await
        .unwrap();
    store
        .set_phase(&id("s"), Phase::Ended, "", 10)
        .await
        .unwrap();
    let ended = store.insert_session(&other).await.unwrap_err();
    assert!(matches!(ended, StoreError::Exists(_)), "{ended}");
    assert_eq!(ended.to_string(), alive.to_string());
    let kept = store.session(&id("s")).await.unwrap().unwrap();
    assert_eq!(kept.owner, "local");
    let page = store.transcript(&sandbox("s"), 0, 0).await.unwrap();
    assert_eq!(page.output, b"secret");
}

#[tokio::test]
async fn a_transcript_that_belongs_to_nobody_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(&dir).await;
        store.insert_session(&session("s")).await.unwrap();
        for name in ["s", "lost"] {
            store
                .append_transcript(&sandbox(name), b"x".to_vec())
                .await
                .unwrap();
        }
        store.close().await;
    }
    std::fs::create_dir(dir.path().join("transcripts/Not A Name")).unwrap();
    open(&dir).await;
    let left: Vec<_> = std::fs::read_dir(dir.path().join("transcripts"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["sbx-s"]);
}

/// Somebody edited the database, or an older k8e wrote what this one cannot read.
#[tokio::test]
async fn a_damaged_record_costs_itself_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for name in ["good", "spec", "phase", "blob"] {
        store.insert_session(&session(name)).await.unwrap();
    }
    let pool = database(&dir).await;
    for sql in [
        "UPDATE sessions SET spec = '{' WHERE id = 'spec'",
        "UPDATE sessions SET phase = 'dreaming' WHERE id = 'phase'",
        "UPDATE sessions SET owner = x'ff00' WHERE id = 'blob'",
    ] {
        sqlx::query(sql).execute(&pool).await.unwrap();
    }
    pool.close().await;
    let listed = store.sessions(&SessionQuery::default()).await.unwrap();
    assert_eq!(listed.len(), 1, "{listed:?}");
    let unended = store.unended_sessions(10).await.unwrap();
    assert_eq!(unended.len(), 1, "{unended:?}");
    assert_eq!(unended[0].id, id("good"));
    // They are over now, and go like others.
    assert_eq!(store.purge_ended(11).await.unwrap(), 3);
}

async fn ended(store: &Store, owner: &str, name: &str, at: i64, bytes: usize) {
    let made = Session {
        owner: owner.to_owned(),
        ..session(name)
    };
    store.insert_session(&made).await.unwrap();
    store
        .append_transcript(&made.sandbox, vec![b'x'; bytes])
        .await
        .unwrap();
    store
        .set_phase(&made.id, Phase::Ended, "", at)
        .await
        .unwrap();
}

async fn names(store: &Store) -> Vec<String> {
    let sessions = store.sessions(&SessionQuery::default()).await.unwrap();
    sessions.into_iter().map(|s| s.id.to_string()).collect()
}

#[tokio::test]
async fn too_many_ended_sessions_go_the_oldest_of_who_has_most_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("alive")).await.unwrap();
    ended(&store, "modest", "b-0", 1, 1).await;
    for n in 0..10 {
        ended(&store, "loop", &format!("a-{n}"), 10 + n, 1).await;
    }
    assert!(!store.ended_too_many(11, u64::MAX).await.unwrap());
    assert_eq!(store.trim_ended(11, u64::MAX).await.unwrap(), 0);
    assert!(store.ended_too_many(10, u64::MAX).await.unwrap());
    // Below the bound, so that the next end does not have to trim again.
    assert_eq!(store.trim_ended(10, u64::MAX).await.unwrap(), 2);
    let left = names(&store).await;
    assert_eq!(
        left,
        [
            "a-2", "a-3", "a-4", "a-5", "a-6", "a-7", "a-8", "a-9", "alive", "b-0"
        ]
    );
    assert!(!dir.path().join("transcripts/sbx-a-0").exists());
}

#[tokio::test]
async fn too_much_output_of_ended_sessions_goes_the_same_way() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("alive")).await.unwrap();
    store
        .append_transcript(&sandbox("alive"), vec![b'x'; 5000])
        .await
        .unwrap();
    ended(&store, "modest", "b-0", 1, 100).await;
    for n in 0..10 {
        ended(&store, "loop", &format!("a-{n}"), 10 + n, 1000).await;
    }
    // What is on disk is known also after a restart.
    store.close().await;
    drop(store);
    let store = open(&dir).await;
    assert!(store.ended_too_many(1000, 5000).await.unwrap());
    assert_eq!(store.trim_ended(1000, 5000).await.unwrap(), 6);
    assert_eq!(
        names(&store).await,
        ["a-6", "a-7", "a-8", "a-9", "alive", "b-0"]
    );
    let page = store.transcript(&sandbox("alive"), 0, 0).await.unwrap();
    assert_eq!(page.output.len(), 5000);
    assert_eq!(store.trim_ended(1000, 5000).await.unwrap(), 0);
}

#[tokio::test]
async fn sessions_are_found_by_owner_tenant_and_phase() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for (name, owner, tenant) in [("a", "x", "t"), ("b", "x", "u"), ("c", "y", "t")] {
        let made = Session {
            owner: owner.to_owned(),
            tenant: tenant.parse().unwrap(),
            ..session(name)
        };
        store.insert_session(&made).await.unwrap();
    }
    store
        .set_phase(&id("a"), Phase::Active, "", 10)
        .await
        .unwrap();
    store
        .set_phase(&id("c"), Phase::Ended, "", 10)
        .await
        .unwrap();
    let ids = async |query: SessionQuery| -> Vec<String> {
        store
            .sessions(&query)
            .await
            .unwrap()
            .into_iter()
            .map(|s| s.id.to_string())
            .collect()
    };
    assert_eq!(ids(SessionQuery::default()).await, ["a", "b", "c"]);
    assert_eq!(
        ids(SessionQuery {
            owner: Some("x".to_owned()),
            ..Default::default()
        })
        .await,
        ["a", "b"]
    );
    assert_eq!(
        ids(SessionQuery {
            phase: Some(Phase::Ended),
            ..Default::default()
        })
        .await,
        ["c"]
    );
    let unended: Vec<_> = store
        .unended_sessions(10)
        .await
        .unwrap()
        .into_iter()
        .map(|s| s.id.to_string())
        .collect();
    assert_eq!(unended, ["a", "b"]);
}

#[tokio::test]
async fn last_use_only_moves_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    store.touch_session(&id("s"), 50).await.unwrap();
    store.touch_session(&id("s"), 40).await.unwrap();
    assert_eq!(
        store.session(&id("s")).await.unwrap().unwrap().last_used,
        50
    );
}

#[tokio::test]
async fn purging_removes_old_ended_sessions_with_everything() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    for name in ["old", "new", "alive"] {
        store.insert_session(&session(name)).await.unwrap();
        store.append_events(&[event(name, 1)]).await.unwrap();
        store
            .append_transcript(&sandbox(name), b"x".to_vec())
            .await
            .unwrap();
    }
    store
        .set_phase(&id("old"), Phase::Ended, "", 10)
        .await
        .unwrap();
    store
        .set_phase(&id("new"), Phase::Ended, "", 100)
        .await
        .unwrap();
    assert_eq!(store.purge_ended(50).await.unwrap(), 1);
    assert_eq!(store.session(&id("old")).await.unwrap(), None);
    assert!(
        store
            .events(&id("old"), 0, 0)
            .await
            .unwrap()
            .events
            .is_empty()
    );
    assert!(!dir.path().join("transcripts/sbx-old").exists());
    assert!(dir.path().join("transcripts/sbx-new").exists());
    assert_eq!(
        store.events(&id("new"), 0, 0).await.unwrap().events.len(),
        1
    );
}

#[tokio::test]
async fn events_are_numbered_paged_and_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    store.insert_session(&session("t")).await.unwrap();
    let total = EVENTS_KEPT_MAX + 20;
    for start in (1..=total).step_by(100) {
        let batch: Vec<_> = (start..=total.min(start + 99))
            .map(|n| event("s", n))
            .collect();
        store.append_events(&batch).await.unwrap();
    }
    store
        .append_events(&[event("t", 1), event("gone", 1)])
        .await
        .unwrap();

    let first = store.events(&id("s"), 0, 0).await.unwrap();
    assert_eq!(
        (first.events.len(), first.events[0].seq, first.truncated),
        (100, 21, true)
    );
    assert_eq!(first.events[0].detail, r#"{"number":21}"#);
    let all = store.events(&id("s"), 20, u32::MAX).await.unwrap();
    assert_eq!((all.events.len(), all.truncated), (1000, false));
    let rest = store.events(&id("s"), total - 1, 10).await.unwrap();
    assert_eq!(
        (rest.events.len(), rest.events[0].seq, rest.truncated),
        (1, total, false)
    );
    assert_eq!(
        store.events(&id("s"), u64::MAX, 0).await.unwrap(),
        Default::default()
    );
    assert_eq!(store.events(&id("t"), 0, 0).await.unwrap().events[0].seq, 1);
}

#[tokio::test]
async fn a_transcript_counts_for_ever_and_stays_small() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    let mebibyte = |n: u8| vec![n; 1024 * 1024];
    for n in 0..20 {
        store
            .append_transcript(&sandbox("s"), mebibyte(n))
            .await
            .unwrap();
    }
    assert!(bytes_in(&dir.path().join("transcripts/sbx-s")) <= 2 * TRANSCRIPT_FILE_BYTES_MAX);
    let page = store.transcript(&sandbox("s"), 0, 4).await.unwrap();
    assert_eq!(
        (page.offset, page.truncated_before, page.eof),
        (8 << 20, true, false)
    );
    assert_eq!(page.output, [8; 4]);

    // Across a restart the offsets go on.
    store.close().await;
    drop(store);
    let store = open(&dir).await;
    store
        .append_transcript(&sandbox("s"), b"end".to_vec())
        .await
        .unwrap();
    let page = store
        .transcript(&sandbox("s"), (20 << 20) - 1, 0)
        .await
        .unwrap();
    assert_eq!(
        (page.output.as_slice(), page.eof, page.truncated_before),
        (&b"\x13end"[..], true, false)
    );
    assert_eq!(page.next_offset, (20 << 20) + 3);
    let beyond = store.transcript(&sandbox("s"), u64::MAX, 0).await.unwrap();
    assert_eq!(
        (beyond.output.len(), beyond.next_offset, beyond.eof),
        (0, (20 << 20) + 3, true)
    );
    // A page across two files, and the largest page.
    let across = store
        .transcript(&sandbox("s"), (16 << 20) - 1, 2)
        .await
        .unwrap();
    assert_eq!(across.output, [15, 16]);
    assert_eq!(
        store
            .transcript(&sandbox("s"), 9 << 20, u64::MAX)
            .await
            .unwrap()
            .output
            .len() as u64,
        PAGE_BYTES_MAX
    );
}

#[tokio::test]
async fn a_transcript_that_is_not_there_is_empty() {
    let dir = tempfile::tempdir().unwrap();
    let page = open(&dir)
        .await
        .transcript(&sandbox("s"), 7, 0)
        .await
        .unwrap();
    assert_eq!(
        (page.output.len(), page.next_offset, page.eof),
        (0, 0, true)
    );
}

#[tokio::test]
async fn many_writers_and_readers_do_not_lock_each_other_out() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move {
                let name = format!("s-{n}");
                store.insert_session(&session(&name)).await.unwrap();
                store.append_events(&[event(&name, 1)]).await.unwrap();
                store.sessions(&SessionQuery::default()).await.unwrap();
                store
                    .set_phase(&id(&name), Phase::Ended, "", 1)
                    .await
                    .unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(
        store
            .sessions(&SessionQuery::default())
            .await
            .unwrap()
            .len(),
        50
    );
}

#[tokio::test]
async fn a_newer_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    open(&dir).await.close().await;
    let pool = database(&dir).await;
    sqlx::query("INSERT INTO _sqlx_migrations SELECT 9999, 'future', installed_on, success, checksum, execution_time FROM _sqlx_migrations LIMIT 1")
        .execute(&pool)
        .await
        .unwrap();
    pool.close().await;
    let error = Store::open(dir.path()).await.unwrap_err();
    assert!(error.to_string().contains("newer k8e"), "{error}");
    assert_eq!(error.code(), Code::Precondition);
}

#[tokio::test]
async fn a_damaged_database_is_told() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("k8e.db"), vec![b'x'; 8192]).unwrap();
    let error = Store::open(dir.path()).await.unwrap_err();
    assert!(error.to_string().contains("damaged"), "{error}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let error = Store::open(&file).await.unwrap_err();
    assert!(error.to_string().contains("--data-dir"), "{error}");

    // Root writes everywhere but where the kernel itself refuses.
    let closed = if rootless() {
        read_only(&dir)
    } else {
        "/proc/k8e".into()
    };
    let error = Store::open(Path::new(&closed)).await.unwrap_err();
    assert!(error.to_string().contains("make it writable"), "{error}");
    assert_eq!(error.code(), Code::Precondition);
}

/// `/dev/full` refuses every byte as a full disk does.
#[tokio::test]
async fn a_full_disk_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    std::fs::create_dir_all(dir.path().join("transcripts/sbx-s")).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join("transcripts/sbx-s/0.log")).unwrap();
    let error = store
        .append_transcript(&sandbox("s"), b"x".to_vec())
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
    assert_eq!(error.code(), Code::Exhausted);
    assert!(error.to_string().contains("free some space"), "{error}");
}

/// The database behind the store's back.
async fn database(dir: &tempfile::TempDir) -> sqlx::SqlitePool {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("k8e.db"));
    sqlx::SqlitePool::connect_with(options).await.unwrap()
}

fn rootless() -> bool {
    std::fs::metadata("/proc/self")
        .map(|m| std::os::unix::fs::MetadataExt::uid(&m) != 0)
        .unwrap()
}

fn read_only(dir: &tempfile::TempDir) -> std::path::PathBuf {
    let closed = dir.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o500)).unwrap();
    closed
}

fn bytes_in(dir: &Path) -> u64 {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum()
}

#[tokio::test]
async fn runs_come_back_as_they_were_and_go_with_their_session() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    let mut run = BackgroundRun::new(
        id("s"),
        "bash".to_owned(),
        Some(Duration::from_millis(7)),
        10,
    );
    store.insert_run(&run).await.unwrap();
    assert_eq!(store.unended_runs().await.unwrap(), [run.clone()]);
    run.status = BackgroundStatus::OomKilled;
    run.reason = "memory".to_owned();
    run.ended_at = Some(20);
    (run.exit_code, run.signal) = (137, 9);
    run.duration = Duration::from_micros(1234);
    run.stdout = vec![0, 255, 10];
    run.stderr_truncated = true;
    run.limits_hit = vec![LimitKind::Memory];
    store.finish_run(&run).await.unwrap();
    assert_eq!(store.unended_runs().await.unwrap(), []);
    for owner in [None, Some("local")] {
        let found = store.run(&run.id, owner).await.unwrap();
        assert_eq!(found, Some(run.clone()));
    }
    assert_eq!(store.run(&run.id, Some("other")).await.unwrap(), None);
    assert_eq!(store.runs(&id("s")).await.unwrap(), [run.without_output()]);
    let unstarted = BackgroundRun::new(id("s"), "x".to_owned(), None, 11);
    store.insert_run(&unstarted).await.unwrap();
    store.remove_run(&unstarted.id).await.unwrap();
    assert_eq!(store.runs(&id("s")).await.unwrap().len(), 1);
    store
        .set_phase(&id("s"), Phase::Ended, "over", 30)
        .await
        .unwrap();
    store.purge_ended(31).await.unwrap();
    assert_eq!(store.run(&run.id, None).await.unwrap(), None);
}

#[tokio::test]
async fn what_runs_wrote_is_bounded_the_oldest_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_session(&session("s")).await.unwrap();
    store.insert_session(&session("other")).await.unwrap();
    let mut runs = Vec::new();
    for n in 0..20 {
        let mut run = BackgroundRun::new(id("s"), format!("n{n}"), None, n);
        store.insert_run(&run).await.unwrap();
        run.status = BackgroundStatus::Completed;
        run.stdout = vec![b'x'; 1 << 20];
        store.finish_run(&run).await.unwrap();
        runs.push(run);
    }
    let kept = store.runs(&id("s")).await.unwrap();
    assert_eq!(kept.len(), 16);
    assert_eq!(kept[0].program, "n19");
    assert_eq!(kept[15].program, "n4");
    // Ended sessions weigh as much as their runs.
    store
        .set_phase(&id("s"), Phase::Ended, "over", 30)
        .await
        .unwrap();
    assert!(!store.ended_too_many(10, 17 << 20).await.unwrap());
    assert!(store.ended_too_many(10, 8 << 20).await.unwrap());
    assert_eq!(store.trim_ended(10, 8 << 20).await.unwrap(), 1);
    assert_eq!(store.run(&runs[19].id, None).await.unwrap(), None);
}

#[tokio::test]
async fn terminals_are_remembered_until_they_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let record = |session: &str| TerminalRecord {
        id: TerminalId::random(),
        session: id(session),
        program: "bash".to_owned(),
        created_at: 5,
    };
    for name in ["a", "b"] {
        store.insert_session(&session(name)).await.unwrap();
    }
    let (one, two, three) = (record("a"), record("a"), record("b"));
    for terminal in [&one, &two, &three] {
        store.insert_terminal(terminal).await.unwrap();
    }
    assert_eq!(store.terminals().await.unwrap().len(), 3);
    store.remove_terminal(&one.id).await.unwrap();
    store.remove_terminals_of(&id("b")).await.unwrap();
    assert_eq!(store.terminals().await.unwrap(), [two]);
}

#[tokio::test]
async fn a_session_is_paused_with_its_sub_agents() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let active = |name: &str| Session {
        phase: Phase::Active,
        ..session(name)
    };
    let child = |name: &str, parent: &str| Session {
        sub_agent: Some(k8e_model::SubAgent {
            parent: id(parent),
            kind: "helper".to_owned(),
            cwd: "/workspace/x".to_owned(),
        }),
        sandbox: k8e_model::SandboxId::random(),
        ..active(name)
    };
    for record in [active("a"), child("a-sub", "a"), child("a-over", "a")] {
        store.insert_session(&record).await.unwrap();
    }
    store.insert_session(&active("b")).await.unwrap();
    store
        .set_phase(&id("a-over"), Phase::Ended, "", 10)
        .await
        .unwrap();
    let phase = async |name: &str| store.session(&id(name)).await.unwrap().unwrap().phase;
    assert!(!store.set_paused(&id("a"), false).await.unwrap());
    assert!(store.set_paused(&id("a"), true).await.unwrap());
    assert!(!store.set_paused(&id("a"), true).await.unwrap());
    assert_eq!(phase("a").await, Phase::Paused);
    assert_eq!(phase("a-sub").await, Phase::Paused);
    assert_eq!(phase("a-over").await, Phase::Ended);
    assert_eq!(phase("b").await, Phase::Active);
    let kept = store.session(&id("a-sub")).await.unwrap().unwrap();
    assert_eq!(kept.sub_agent, child("a-sub", "a").sub_agent);
    assert!(store.set_paused(&id("a"), false).await.unwrap());
    assert_eq!(phase("a-sub").await, Phase::Active);
    assert!(store.set_paused(&id("a"), true).await.unwrap());
    let parent = id("a");
    let end = store.set_phase(&parent, Phase::Terminating, "why", 10);
    assert!(end.await.unwrap());
    assert!(!store.set_paused(&id("none"), true).await.unwrap());
}
