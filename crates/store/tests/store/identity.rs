//! Keys, certificates that were taken back, the audit, and secrets.

use super::{database, open};
use k8e_model::{Code, KeyHash, KeyId, SecretName, SecretValue, Tenants};
use k8e_store::{AuditQuery, AuditRow, KeyRecord, StoreError};
use std::os::unix::fs::PermissionsExt as _;

fn tenants(entries: &[&str]) -> Tenants {
    let entries: Vec<_> = entries.iter().map(|&entry| entry.to_owned()).collect();
    Tenants::parse(&entries).unwrap().unwrap()
}

fn key(name: &str) -> KeyRecord {
    let mut hash = [7; 32];
    hash[..name.len()].copy_from_slice(name.as_bytes());
    KeyRecord {
        id: KeyId::random(),
        name: name.parse().unwrap(),
        principal: "ann".parse().unwrap(),
        tenants: tenants(&["team", "other"]),
        hash: KeyHash(hash),
        created_at: 1,
        expires_at: Some(2),
        last_used: None,
    }
}

#[tokio::test]
async fn keys_come_back_until_they_are_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (key("a"), key("b"));
    let store = open(&dir).await;
    store.insert_key(&a).await.unwrap();
    store.insert_key(&b).await.unwrap();
    store.touch_key(&b.id, 9).await.unwrap();
    store.close().await;

    let store = open(&dir).await;
    let mut kept = store.keys().await.unwrap();
    kept.sort_by(|x, y| x.name.cmp(&y.name));
    let used = KeyRecord {
        last_used: Some(9),
        ..b.clone()
    };
    assert_eq!(kept, [a.clone(), used]);
    assert!(store.delete_key(&a.id, 5).await.unwrap());
    assert!(!store.delete_key(&a.id, 6).await.unwrap());
    assert_eq!(store.keys().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_key_of_an_older_server_may_use_any_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.insert_key(&key("a")).await.unwrap();
    store.close().await;
    let pool = database(&dir).await;
    for undo in [
        "ALTER TABLE api_keys DROP COLUMN tenants",
        "DELETE FROM _sqlx_migrations WHERE version = 10",
    ] {
        sqlx::query(undo).execute(&pool).await.unwrap();
    }
    pool.close().await;

    let store = open(&dir).await;
    let any = KeyRecord {
        tenants: tenants(&["*"]),
        ..key("b")
    };
    store.insert_key(&any).await.unwrap();
    let kept = store.keys().await.unwrap();
    assert_eq!(kept.len(), 2);
    assert!(kept.iter().all(|key| key.tenants == Tenants::any()));
}

#[tokio::test]
async fn a_name_is_free_again_when_its_key_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let first = key("a");
    store.insert_key(&first).await.unwrap();
    let mut again = key("a");
    again.hash = KeyHash([1; 32]);
    let taken = store.insert_key(&again).await.unwrap_err();
    assert!(matches!(taken, StoreError::KeyExists(_)), "{taken}");
    assert_eq!(taken.code(), Code::Exists);
    store.delete_key(&first.id, 1).await.unwrap();
    store.insert_key(&again).await.unwrap();
}

#[tokio::test]
async fn revoked_certificates_stay_revoked_while_they_could_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store.revoke_certificate("0a", 10).await.unwrap();
    store.revoke_certificate("0b", 20).await.unwrap();
    store.revoke_certificate("0b", 30).await.unwrap();
    store.close().await;
    let store = open(&dir).await;
    assert_eq!(store.revoked_certificates(10).await.unwrap().len(), 2);
    let left = store.revoked_certificates(15).await.unwrap();
    assert_eq!(left.into_iter().collect::<Vec<_>>(), ["0b"]);
}

fn row(at: i64, principal: &str) -> AuditRow {
    AuditRow {
        at,
        principal: principal.to_owned(),
        key: "key-a".to_owned(),
        source: "192.0.2.1".to_owned(),
        action: "session.create".to_owned(),
        object: "s".to_owned(),
        code: "ok".to_owned(),
    }
}

#[tokio::test]
async fn the_audit_is_asked_by_who_and_when() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let rows = [row(1, "ann"), row(2, "bob"), row(3, "ann"), row(4, "ann")];
    store.append_audit(&rows).await.unwrap();
    let asked = async |principal: Option<&str>, since, limit| {
        let query = AuditQuery {
            principal: principal.map(str::to_owned),
            since,
            limit,
        };
        let rows = store.audit(&query).await.unwrap();
        rows.iter().map(|row| row.at).collect::<Vec<_>>()
    };
    assert_eq!(asked(None, None, 0).await, [1, 2, 3, 4]);
    assert_eq!(asked(None, None, 2).await, [3, 4]);
    assert_eq!(asked(Some("ann"), Some(2), 0).await, [3, 4]);
    assert_eq!(asked(Some("carol"), None, 0).await, [0; 0]);
}

fn name(text: &str) -> SecretName {
    SecretName::new(text, "").unwrap()
}

fn value(text: &str) -> SecretValue {
    SecretValue::new(text.as_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn secrets_come_back_and_are_not_on_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    let plain = "hunter2-hunter2-hunter2";
    assert!(
        store
            .set_secret("ann", &name("pw"), &value("old"), 1, 9)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_secret("ann", &name("pw"), &value(plain), 2, 9)
            .await
            .unwrap()
    );
    store.close().await;

    let store = open(&dir).await;
    let read = store.secret("ann", &name("pw")).await.unwrap().unwrap();
    assert_eq!(read.reveal(), plain.as_bytes());
    assert!(store.secret("bob", &name("pw")).await.unwrap().is_none());
    let listed = store.secrets(Some("ann")).await.unwrap();
    assert_eq!((listed.len(), listed[0].updated_at), (1, 2));
    assert!(store.secrets(Some("bob")).await.unwrap().is_empty());
    store.close().await;

    let mode = std::fs::metadata(dir.path().join("secrets.key"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let file = file.unwrap().path();
        let Ok(bytes) = std::fs::read(&file) else {
            continue;
        };
        let found = bytes
            .windows(plain.len())
            .any(|window| window == plain.as_bytes());
        assert!(!found, "{}", file.display());
    }
}

#[tokio::test]
async fn a_secret_opens_only_where_it_was_put() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store
        .set_secret("ann", &name("pw"), &value("hers"), 1, 9)
        .await
        .unwrap();
    store
        .set_secret("bob", &name("pw"), &value("bob's"), 1, 9)
        .await
        .unwrap();
    store.close().await;
    // Somebody who can write the database but not read the key moves a row.
    let moved = std::process::Command::new("python3")
        .arg("-c")
        .arg("import sqlite3,sys; c=sqlite3.connect(sys.argv[1]); c.execute(\"UPDATE secrets SET sealed=(SELECT sealed FROM secrets WHERE owner='ann') WHERE owner='bob'\"); c.commit()")
        .arg(dir.path().join("k8e.db"))
        .status()
        .unwrap();
    assert!(moved.success());
    let store = open(&dir).await;
    let error = store.secret("bob", &name("pw")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unsealed { .. }), "{error}");
    store.secret("ann", &name("pw")).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_lost_key_is_told_and_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    store
        .set_secret("ann", &name("pw"), &value("x"), 1, 9)
        .await
        .unwrap();
    store.close().await;
    let path = dir.path().join("secrets.key");
    std::fs::remove_file(&path).unwrap();
    let store = open(&dir).await;
    let error = store.secret("ann", &name("pw")).await.unwrap_err();
    assert!(error.to_string().contains("secrets.key"), "{error}");
    let again = store
        .set_secret("ann", &name("other"), &value("x"), 1, 9)
        .await;
    assert!(again.is_err() && !path.exists());
    // Deleting works without: that is the way out.
    assert_eq!(store.delete_secret("ann", "pw", None).await.unwrap(), 1);
    assert!(
        store
            .set_secret("ann", &name("pw"), &value("x"), 1, 9)
            .await
            .unwrap()
    );
}

#[tokio::test]
async fn an_owner_has_so_many_secrets_and_can_change_each() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir).await;
    assert!(
        store
            .set_secret("ann", &name("a"), &value("1"), 1, 2)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_secret("ann", &name("b"), &value("1"), 1, 2)
            .await
            .unwrap()
    );
    assert!(
        !store
            .set_secret("ann", &name("c"), &value("1"), 1, 2)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_secret("ann", &name("b"), &value("2"), 1, 2)
            .await
            .unwrap()
    );
    assert!(
        store
            .set_secret("bob", &name("c"), &value("1"), 1, 2)
            .await
            .unwrap()
    );
    let twice = SecretName::new("b", "other").unwrap();
    assert_eq!(
        store
            .delete_secret("ann", "b", Some(twice.key()))
            .await
            .unwrap(),
        0
    );
    assert_eq!(store.delete_secret("ann", "b", None).await.unwrap(), 1);
}
