//! Secrets, encrypted at rest.
//!
//! Each value is encrypted (AES-256-GCM) with a key in a separate file that only the server can read: a copy of the database
//! reveals nothing. Owner and names are associated data, so that a row that was moved to another owner cannot be decrypted.

use crate::{Store, StoreError};
use k8e_model::{SecretName, SecretValue, UnixMillis};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use sqlx::Row as _;
use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

const KEY_BYTES: usize = 32;

/// A secret without its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretEntry {
    /// Owner.
    pub owner: String,
    /// Name and key.
    pub secret: SecretName,
    /// When it was last set.
    pub updated_at: UnixMillis,
}

/// Encrypts and decrypts values. Its Debug output has no key.
pub(crate) struct Sealer(LessSafeKey);

// === impl Store ===

impl Store {
    /// Sets a secret. False when the owner has `max` secrets already.
    pub async fn set_secret(
        &self,
        owner: &str,
        secret: &SecretName,
        value: &SecretValue,
        at: UnixMillis,
        max: usize,
    ) -> Result<bool, StoreError> {
        let sealer = self.sealer(self.missing_key().await?).await?;
        let sealed = sealer.seal(bound_to(owner, secret), value.reveal());
        let done = sqlx::query(
            "INSERT INTO secrets (owner, name, key, sealed, updated_at) \
             SELECT $1, $2, $3, $4, $5 \
             WHERE (SELECT COUNT(*) FROM secrets WHERE owner = $1) < $6 \
                OR EXISTS (SELECT 1 FROM secrets WHERE owner = $1 AND name = $2 AND key = $3) \
             ON CONFLICT (owner, name, key) DO UPDATE SET sealed = $4, updated_at = $5",
        )
        .bind(owner)
        .bind(secret.name())
        .bind(secret.key())
        .bind(sealed)
        .bind(at)
        .bind(i64::try_from(max).unwrap_or(i64::MAX))
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("write a secret"))?;
        Ok(done.rows_affected() > 0)
    }

    /// A secret's value, if the owner has it.
    pub async fn secret(
        &self,
        owner: &str,
        secret: &SecretName,
    ) -> Result<Option<SecretValue>, StoreError> {
        let row =
            sqlx::query("SELECT sealed FROM secrets WHERE owner = $1 AND name = $2 AND key = $3")
                .bind(owner)
                .bind(secret.name())
                .bind(secret.key())
                .fetch_optional(&self.shared.read)
                .await
                .map_err(self.sql("read a secret"))?;
        let Some(row) = row else { return Ok(None) };
        let sealed: Vec<u8> = row.get(0);
        let value = self
            .sealer(Missing::IsWrong)
            .await?
            .open(bound_to(owner, secret), &sealed)
            .and_then(|value| SecretValue::new(value).ok());
        match value {
            Some(value) => Ok(Some(value)),
            None => Err(StoreError::Unsealed {
                secret: secret.to_string(),
                key: self.key_path(),
            }),
        }
    }

    /// Secrets without their values: of one owner, or of all.
    pub async fn secrets(&self, owner: Option<&str>) -> Result<Vec<SecretEntry>, StoreError> {
        let rows = sqlx::query(
            "SELECT owner, name, key, updated_at FROM secrets WHERE $1 IS NULL OR owner = $1 \
             ORDER BY owner, name, key",
        )
        .bind(owner)
        .fetch_all(&self.shared.read)
        .await
        .map_err(self.sql("list secrets"))?;
        let entries = rows.iter().filter_map(|row| {
            let text = |column: &str| row.try_get::<String, _>(column).ok();
            Some(SecretEntry {
                owner: text("owner")?,
                secret: SecretName::new(&text("name")?, &text("key")?).ok()?,
                updated_at: row.try_get("updated_at").ok()?,
            })
        });
        Ok(entries.collect())
    }

    /// Removes one value of a secret, or without a key all of them. Returns how many.
    pub async fn delete_secret(
        &self,
        owner: &str,
        name: &str,
        key: Option<&str>,
    ) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "DELETE FROM secrets WHERE owner = $1 AND name = $2 AND ($3 IS NULL OR key = $3)",
        )
        .bind(owner)
        .bind(name)
        .bind(key)
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("delete a secret"))?;
        Ok(done.rows_affected())
    }

    fn key_path(&self) -> PathBuf {
        self.shared.dir.join("secrets.key")
    }

    /// Reads the key. It is not created where secrets exist: that would hide the loss of the old one.
    pub(crate) async fn missing_key(&self) -> Result<Missing, StoreError> {
        let any = sqlx::query("SELECT 1 FROM secrets LIMIT 1")
            .fetch_optional(&self.shared.read)
            .await
            .map_err(self.sql("read the secrets"))?;
        Ok(if any.is_some() {
            Missing::IsWrong
        } else {
            Missing::Make
        })
    }

    /// The key that access tokens of sessions are derived with; created at its first use.
    pub async fn token_key(&self) -> Result<[u8; KEY_BYTES], StoreError> {
        let path = self.shared.dir.join("tokens.key");
        let key = match read_key(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => make_key(&path),
            read => read,
        };
        key.map_err(|source| StoreError::SecretKey { path, source })
    }

    pub(crate) async fn sealer(&self, missing: Missing) -> Result<&Sealer, StoreError> {
        let load = async {
            let path = self.key_path();
            load(&path, missing).map_err(|source| StoreError::SecretKey { path, source })
        };
        self.shared.sealer.get_or_try_init(|| load).await
    }
}

/// What a missing key file means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// No secrets yet: the key is created.
    Make,
    /// Secrets exist that cannot be decrypted: an error.
    IsWrong,
}

// === impl Sealer ===

impl Sealer {
    fn new(key: &[u8]) -> Option<Self> {
        let key = UnboundKey::new(&AES_256_GCM, key).ok()?;
        Some(Self(LessSafeKey::new(key)))
    }

    /// Encrypts; the nonce comes first. It is random: below 2³² values under one key a collision is negligible.
    pub(crate) fn seal(&self, bound_to: Vec<u8>, value: &[u8]) -> Vec<u8> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new()
            .fill(&mut nonce)
            .expect("the kernel always has random bytes after boot");
        let mut sealed = value.to_vec();
        self.0
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(bound_to),
                &mut sealed,
            )
            .expect("a value is far smaller than what a key may seal");
        [nonce.as_slice(), &sealed].concat()
    }

    /// Decrypts; `None` for another key, other associated data, or modified data.
    pub(crate) fn open(&self, bound_to: Vec<u8>, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, rest) = sealed.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut rest = rest.to_vec();
        let value = self.0.open_in_place(nonce, Aad::from(bound_to), &mut rest);
        let value = value.ok()?;
        Some(value.to_vec())
    }
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sealer(…)")
    }
}

/// Associated data: names joined by NUL, which no name contains, so that it is unambiguous.
fn bound_to(owner: &str, secret: &SecretName) -> Vec<u8> {
    [owner, secret.name(), secret.key()].join("\0").into_bytes()
}

fn load(path: &Path, missing: Missing) -> io::Result<Sealer> {
    let key = match read_key(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound && missing == Missing::Make => make_key(path),
        read => read,
    };
    Sealer::new(&key?).ok_or_else(|| io::Error::other("the key was not taken"))
}

fn read_key(path: &Path) -> io::Result<[u8; KEY_BYTES]> {
    let mut key = Vec::new();
    let file = std::fs::File::open(path)?;
    // One more, so that a longer file is not taken for a key.
    file.take(KEY_BYTES as u64 + 1).read_to_end(&mut key)?;
    key.try_into()
        .map_err(|_| io::Error::other(format!("it must have {KEY_BYTES} bytes")))
}

/// Writes the key file atomically, also in case of a crash.
fn make_key(path: &Path) -> io::Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    SystemRandom::new()
        .fill(&mut key)
        .map_err(|_| io::Error::other("no random bytes"))?;
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(&key)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    if let Some(dir) = path.parent() {
        std::fs::File::open(dir)?.sync_all()?;
    }
    Ok(key)
}
