//! API keys and client certificates: authentication, expiry, revocation.
//!
//! Every call authenticates, so all keys are cached in memory, by a prefix of their hash. A
//! deletion changes cache and store in one call, so it takes effect from the next call on and after
//! a restart. A certificate names the key that it was issued for and is valid as long as that key.

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use k8e_model::{ApiKey, KeyHash, KeyId, Principal, PrincipalName, Tenants, UnixMillis};
use k8e_store::{KeyRecord, Store};
use ring::digest::{SHA256, digest};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::watch;

/// Limit of API keys: all are cached in memory, some hundred bytes each.
const KEYS_MAX: usize = 10_000;

/// Retention of revocations. A certificate is valid for 90 days: an older revocation has no effect.
const REVOKED_KEPT: Duration = Duration::from_secs(100 * 24 * 3600);

/// Debounce of writing a key's last use, in milliseconds: a busy key must not write all the time.
const USED_EVERY_MS: i64 = 60_000;

/// Request for a new API key.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// Name, chosen by the administrator.
    pub name: PrincipalName,
    /// Principal that it authenticates; none is one of the key's name.
    pub principal: Option<PrincipalName>,
    /// Tenants that its principal may create sessions for; none is a tenant of the key's own.
    pub tenants: Option<Tenants>,
    /// Validity; none is unlimited.
    pub expires_in: Option<Duration>,
}

/// Metadata of an API key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyView {
    /// Identifier, not secret.
    pub id: KeyId,
    /// Name, chosen by the administrator.
    pub name: PrincipalName,
    /// Principal that it authenticates.
    pub principal: PrincipalName,
    /// Tenants that its principal may create sessions for.
    pub tenants: Tenants,
    /// Creation time.
    pub created_at: UnixMillis,
    /// Expiry time; none is never.
    pub expires_at: Option<UnixMillis>,
    /// Time of the last call with it, to the minute.
    pub last_used: Option<UnixMillis>,
    /// Whether it has expired.
    pub expired: bool,
}

/// Client certificate issued by this server, verified by a TLS handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Serial number, in hexadecimal digits.
    pub serial: String,
    /// Subject's common name: the principal.
    pub common_name: String,
    /// Expiry time (`notAfter`), checked on open connections too.
    pub ends_at: UnixMillis,
    /// API key that it was issued for; none for one that the server issued for itself.
    pub key: Option<KeyId>,
}

/// Cache of API keys and revoked certificates.
pub(crate) struct Keys {
    cache: RwLock<Cache>,
    /// Counts revocations; watched to end calls in progress.
    revocations: watch::Sender<u64>,
    /// Serializes creation, so that the limit of keys holds.
    create_lock: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Cache {
    by_id: HashMap<KeyId, Arc<CachedKey>>,
    /// By hash prefix; the whole hash is compared in constant time.
    by_hash: HashMap<[u8; 8], Arc<CachedKey>>,
    revoked: HashSet<String>,
}

struct CachedKey {
    record: KeyRecord,
    used: AtomicI64,
    /// Refused from now on, whether or not the store could be written.
    deleted: AtomicBool,
}

// === impl Sessions ===

impl Sessions {
    /// Creates a key. It is returned once and stored only as a hash. Requires administrator rights.
    pub async fn create_key(
        &self,
        who: &Principal,
        new: NewKey,
    ) -> Result<(KeyView, ApiKey), Error> {
        let audit = self.audited(who, "key.create", new.name.as_str());
        audit.end(self.make_key(who, new).await)
    }

    async fn make_key(&self, who: &Principal, new: NewKey) -> Result<(KeyView, ApiKey), Error> {
        self.administrator(who, "API keys are made")?;
        let keys = &self.shared.keys;
        let _creating = keys.create_lock.lock().await;
        if keys.cache().by_id.len() >= KEYS_MAX {
            return Err(Error::KeysFull { max: KEYS_MAX });
        }
        let now = now_ms();
        let key = ApiKey::random();
        let lifetime_ms = new.expires_in.map(|time| i64::try_from(time.as_millis()));
        let id = KeyId::random();
        let record = KeyRecord {
            tenants: new
                .tenants
                .unwrap_or_else(|| Tenants::of_key(&new.name, &id)),
            id,
            principal: new.principal.unwrap_or_else(|| new.name.clone()),
            name: new.name,
            hash: hash(&key),
            created_at: now,
            expires_at: lifetime_ms.map(|ms| now.saturating_add(ms.unwrap_or(i64::MAX))),
            last_used: None,
        };
        self.shared.store.insert_key(&record).await?;
        let cached = Arc::new(CachedKey::new(record));
        keys.cache_mut().insert(&cached);
        Ok((cached.view(now), key))
    }

    /// All keys, the oldest first. Requires administrator rights.
    pub fn list_keys(&self, who: &Principal) -> Result<Vec<KeyView>, Error> {
        self.administrator(who, "API keys are listed")?;
        let now = now_ms();
        let cache = self.shared.keys.cache();
        let mut keys: Vec<_> = cache
            .by_id
            .values()
            .map(|cached| cached.view(now))
            .collect();
        drop(cache);
        keys.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(keys)
    }

    /// Deletes a key, by id or by name: it and every certificate that was issued for it are refused
    /// from the next call on, and calls in progress with them end. Requires administrator rights.
    pub async fn delete_key(&self, who: &Principal, named: &str) -> Result<KeyView, Error> {
        let mut audit = self.audited(who, "key.delete", named);
        if let Err(error) = self.administrator(who, "API keys are deleted") {
            return audit.end(Err(error));
        }
        let keys = &self.shared.keys;
        let Some(cached) = keys.named(named) else {
            return audit.end(Err(Error::KeyNotFound(named.to_owned())));
        };
        audit.about(&format!("{} ({})", cached.record.id, cached.record.name));
        // Memory first: a full disk must not keep a key alive.
        cached.deleted.store(true, Ordering::SeqCst);
        keys.announce_revocation();
        let deleted = self
            .shared
            .store
            .delete_key(&cached.record.id, now_ms())
            .await;
        if deleted.is_ok() {
            keys.cache_mut().remove(&cached);
        }
        audit.end(deleted.map(|_| cached.view(now_ms())).map_err(Error::from))
    }

    /// Revokes a certificate from the next call on. Requires administrator rights.
    pub async fn revoke_certificate(&self, who: &Principal, serial: &str) -> Result<(), Error> {
        let audit = self.audited(who, "certificate.revoke", serial);
        audit.end(self.revoke(who, serial).await)
    }

    async fn revoke(&self, who: &Principal, serial: &str) -> Result<(), Error> {
        self.administrator(who, "certificates are revoked")?;
        let serial = canonical_serial(serial)?;
        let keys = &self.shared.keys;
        keys.cache_mut().revoked.insert(serial.clone());
        keys.announce_revocation();
        Ok(self
            .shared
            .store
            .revoke_certificate(&serial, now_ms())
            .await?)
    }

    /// Authenticates an API key. Unknown, deleted and expired keys give the same error.
    pub fn verify_key(&self, key: &ApiKey) -> Result<(Principal, KeyId), Error> {
        let hash = hash(key);
        let found = self
            .shared
            .keys
            .cache()
            .by_hash
            .get(&prefix(&hash))
            .cloned();
        let now = now_ms();
        let cached = found
            .filter(|cached| cached.record.hash == hash && cached.is_valid(now))
            .ok_or(Error::KeyInvalid)?;
        if cached.mark_used(now) {
            self.shared.recorder.key_used(&cached.record.id, now);
        }
        Ok((cached.principal(), cached.record.id.clone()))
    }

    /// Authenticates a client certificate: revocation, expiry, and the key that it was issued for.
    pub fn verify_certificate(&self, certificate: &Certificate) -> Result<Principal, Error> {
        let cache = self.shared.keys.cache();
        if cache.revoked.contains(&certificate.serial) {
            return Err(Error::CertificateRevoked);
        }
        let now = now_ms();
        if certificate.ends_at <= now {
            return Err(Error::CertificateExpired);
        }
        let Some(key) = &certificate.key else {
            return Ok(Principal::certificate(&certificate.common_name));
        };
        match cache.by_id.get(key) {
            Some(cached) if cached.is_valid(now) => Ok(cached.principal()),
            _ => Err(Error::CertificateRevoked),
        }
    }

    /// Looks up a valid key.
    pub fn valid_key(&self, id: &KeyId) -> Result<KeyView, Error> {
        let now = now_ms();
        match self.shared.keys.cache().by_id.get(id) {
            Some(cached) if cached.is_valid(now) => Ok(cached.view(now)),
            _ => Err(Error::KeyInvalid),
        }
    }

    /// Changes whenever a key is deleted or a certificate revoked.
    pub fn credentials(&self) -> watch::Receiver<u64> {
        self.shared.keys.revocations.subscribe()
    }
}

// === impl Keys ===

impl Keys {
    pub(crate) async fn load(store: &Store) -> Result<Self, Error> {
        let kept = i64::try_from(REVOKED_KEPT.as_millis()).unwrap_or(i64::MAX);
        let mut cache = Cache {
            revoked: store.revoked_certificates(now_ms() - kept).await?,
            ..Cache::default()
        };
        for record in store.keys().await? {
            cache.insert(&Arc::new(CachedKey::new(record)));
        }
        Ok(Self {
            cache: RwLock::new(cache),
            revocations: watch::Sender::new(0),
            create_lock: tokio::sync::Mutex::default(),
        })
    }

    fn named(&self, named: &str) -> Option<Arc<CachedKey>> {
        let is = |cached: &&Arc<CachedKey>| {
            cached.record.id.as_str() == named || cached.record.name.as_str() == named
        };
        self.cache().by_id.values().find(is).cloned()
    }

    fn announce_revocation(&self) {
        self.revocations.send_modify(|count| *count += 1);
    }

    fn cache(&self) -> RwLockReadGuard<'_, Cache> {
        self.cache.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn cache_mut(&self) -> RwLockWriteGuard<'_, Cache> {
        self.cache.write().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Cache ===

impl Cache {
    fn insert(&mut self, cached: &Arc<CachedKey>) {
        self.by_id
            .insert(cached.record.id.clone(), Arc::clone(cached));
        self.by_hash
            .insert(prefix(&cached.record.hash), Arc::clone(cached));
    }

    fn remove(&mut self, cached: &CachedKey) {
        self.by_id.remove(&cached.record.id);
        self.by_hash.remove(&prefix(&cached.record.hash));
    }
}

// === impl CachedKey ===

impl CachedKey {
    fn new(record: KeyRecord) -> Self {
        Self {
            used: AtomicI64::new(record.last_used.unwrap_or(0)),
            deleted: AtomicBool::new(false),
            record,
        }
    }

    /// Principal that it authenticates.
    fn principal(&self) -> Principal {
        let KeyRecord {
            id,
            principal,
            tenants,
            ..
        } = &self.record;
        Principal::user(principal, id.clone(), tenants.clone())
    }

    fn is_valid(&self, now: UnixMillis) -> bool {
        !self.deleted.load(Ordering::SeqCst) && !self.expired(now)
    }

    fn expired(&self, now: UnixMillis) -> bool {
        self.record.expires_at.is_some_and(|at| at <= now)
    }

    /// Marks the key as used; true when the last use is to be stored (debounced).
    fn mark_used(&self, now: UnixMillis) -> bool {
        let before = self.used.load(Ordering::Relaxed);
        now - before >= USED_EVERY_MS
            && self
                .used
                .compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn view(&self, now: UnixMillis) -> KeyView {
        let KeyRecord {
            id,
            name,
            principal,
            tenants,
            hash: _,
            created_at,
            expires_at,
            last_used: _,
        } = self.record.clone();
        let used = self.used.load(Ordering::Relaxed);
        KeyView {
            id,
            name,
            principal,
            tenants,
            created_at,
            expires_at,
            last_used: (used > 0).then_some(used),
            expired: self.expired(now),
        }
    }
}

fn hash(key: &ApiKey) -> KeyHash {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, key.as_bytes()).as_ref());
    KeyHash(hash)
}

fn prefix(hash: &KeyHash) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = hash.0;
    [a, b, c, d, e, f, g, h]
}

/// Canonical form of a certificate's serial number: hexadecimal digits without colons or leading zeros.
fn canonical_serial(text: &str) -> Result<String, Error> {
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let digits = digits.trim_start_matches('0').to_ascii_lowercase();
    // RFC 5280 has 20 bytes at most.
    if digits.is_empty() || digits.len() > 40 || !digits.chars().all(|c| c.is_ascii_hexdigit()) {
        return Err(Error::Invalid(
            "a certificate's serial number is up to 40 hexadecimal digits, as the audit shows it"
                .to_owned(),
        ));
    }
    Ok(digits)
}
