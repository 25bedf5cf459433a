//! Audit log.

use super::*;
use k8e_engine::{AuditQuery, WriteOptions};
use k8e_model::{GuestPath, KeyId, Tenants};

async fn rows(server: &Server, query: AuditQuery) -> Vec<(String, String, String, String)> {
    let rows = server.sessions.audit(&Principal::local(), &query).await;
    let row = |row: k8e_engine::AuditRow| (row.principal, row.action, row.object, row.code);
    rows.unwrap().into_iter().map(row).collect()
}

fn row(
    principal: &str,
    action: &str,
    object: &str,
    code: &str,
) -> (String, String, String, String) {
    (principal.into(), action.into(), object.into(), code.into())
}

#[tokio::test]
async fn every_change_leaves_a_row_with_its_result() {
    let server = Server::start().await;
    server.create("s").await;
    server.run("s", "true").await.unwrap();
    let stranger = server.sessions.destroy(&other(), &sid("s")).await;
    refused(stranger, Code::NotFound, "not found");
    server.sessions.destroy(&me(), &sid("s")).await.unwrap();
    let all = rows(&server, AuditQuery::default()).await;
    assert_eq!(
        all,
        [
            row("cert:me", "session.create", "s", "ok"),
            row("cert:me", "run", "s", "ok"),
            row("cert:other", "session.destroy", "s", "not_found"),
            row("cert:me", "session.destroy", "s", "ok"),
        ]
    );
    let others = AuditQuery {
        principal: Some("cert:other".to_owned()),
        ..AuditQuery::default()
    };
    assert_eq!(rows(&server, others).await.len(), 1);
}

#[tokio::test]
async fn file_writes_are_audited_and_reads_are_not() {
    let server = Server::start().await;
    server.create("s").await;
    let path = GuestPath::parse(b"a\xff").unwrap();
    let (who, id) = (me(), sid("s"));
    let sessions = &server.sessions;
    let writer = sessions
        .write_file(&who, &id, &path, WriteOptions::default())
        .await;
    drop(writer.unwrap());
    let _ = sessions.make_dir(&who, &id, &path, false, 0).await;
    let _ = sessions.move_file(&who, &id, &path, &path).await;
    let _ = sessions.remove_file(&who, &id, &path, true).await;
    sessions.get(&who, &id).await.unwrap();
    let _ = sessions.stat(&who, &id, &path).await;
    let all = rows(&server, AuditQuery::default()).await;
    let told: Vec<_> = all
        .iter()
        .map(|row| (row.1.as_str(), row.2.as_str()))
        .collect();
    let object = r"s:a\xff";
    assert_eq!(
        told,
        [
            ("session.create", "s"),
            ("file.write", object),
            ("file.mkdir", object),
            ("file.move", object),
            ("file.remove", object),
        ]
    );
    assert_eq!(all[1].3, "cancelled");
}

#[tokio::test]
async fn the_audit_survives_a_restart() {
    let server = Server::start().await;
    server.create("s").await;
    let server = server.restart().await;
    assert_eq!(rows(&server, AuditQuery::default()).await.len(), 1);
}

#[tokio::test]
async fn a_row_has_key_and_source_address() {
    let server = Server::start().await;
    let key = KeyId::random();
    let ann = Principal::user(&"ann".parse().unwrap(), key.clone(), Tenants::any());
    let calls = [
        (
            ann.calling_from("192.0.2.1".to_owned()),
            key.as_str(),
            "192.0.2.1",
        ),
        (
            Principal::local().calling_from("uid:7".to_owned()),
            "",
            "uid:7",
        ),
        (Principal::local(), "", ""),
    ];
    for (who, key, source) in calls {
        let _ = server.sessions.destroy(&who, &sid("none")).await;
        let last = AuditQuery {
            limit: 1,
            ..AuditQuery::default()
        };
        let rows = server.sessions.audit(&Principal::local(), &last).await;
        let row = rows.unwrap().remove(0);
        assert_eq!((row.key.as_str(), row.source.as_str()), (key, source));
    }
}
