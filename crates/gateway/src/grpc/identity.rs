//! `k8e.v1.Identity`: keys, certificates and the audit.

use super::{Answer, engine_status, model_status};
use crate::auth::tls::{CERT_LIFETIME, ForClient, Tls};
use crate::auth::{Credential, principal};
use k8e_api::status::to_status;
use k8e_api::v1::identity_server::Identity;
use k8e_api::{convert, v1};
use k8e_engine::{AuditQuery, AuditRow, KeyView, NewKey, Sessions};
use k8e_model::{Code, KeyId, UnixMillis};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::{Request, Response, Status};

/// A certificate request is a key, a name and a signature: under a kilobyte with P-256.
const CSR_BYTES_MAX: usize = 16 * 1024;

/// Of what a device calls itself, in the audit.
const DEVICE_CHARS_MAX: usize = 64;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
    /// None when nobody can come in by TLS.
    pub(super) tls: Option<Arc<Tls>>,
}

// === impl Service ===

#[tonic::async_trait]
impl Identity for Service {
    async fn login(&self, request: Request<v1::LoginRequest>) -> Answer<v1::LoginResponse> {
        let who = principal(&request)?;
        let key = login_key(request.extensions().get())?;
        let request = request.into_inner();
        let device = device(&request.device_name);
        let mut audit = self.sessions.audited(&who, "login", &device);
        let answer = self.certificate(&key, &request);
        let code = answer.as_ref().map(drop).map_err(|(code, _)| *code);
        if let Ok((_, serial)) = &answer {
            audit.about(&format!("{serial} {device}"));
        }
        audit.end_with(code);
        match answer {
            Ok((response, _)) => Ok(Response::new(response)),
            Err((code, message)) => Err(to_status(code, &message)),
        }
    }

    async fn create_key(
        &self,
        request: Request<v1::CreateKeyRequest>,
    ) -> Answer<v1::CreateKeyResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let new = NewKey {
            name: request.name.parse().map_err(model_status)?,
            principal: convert::principal_name(&request.principal).map_err(model_status)?,
            expires_in: convert::expires_in(request.expires_in_s).map_err(model_status)?,
        };
        let made = self.sessions.create_key(&who, new).await;
        let (view, secret) = made.map_err(engine_status)?;
        Ok(Response::new(v1::CreateKeyResponse {
            key: Some(key(view)),
            secret: secret.reveal(),
        }))
    }

    async fn list_keys(
        &self,
        request: Request<v1::ListKeysRequest>,
    ) -> Answer<v1::ListKeysResponse> {
        let who = principal(&request)?;
        let keys = self.sessions.list_keys(&who).map_err(engine_status)?;
        let keys = keys.into_iter().map(key).collect();
        Ok(Response::new(v1::ListKeysResponse { keys }))
    }

    async fn delete_key(
        &self,
        request: Request<v1::DeleteKeyRequest>,
    ) -> Answer<v1::DeleteKeyResponse> {
        let who = principal(&request)?;
        let deleted = self.sessions.delete_key(&who, &request.get_ref().id).await;
        let key = Some(key(deleted.map_err(engine_status)?));
        Ok(Response::new(v1::DeleteKeyResponse { key }))
    }

    async fn revoke_certificate(
        &self,
        request: Request<v1::RevokeCertificateRequest>,
    ) -> Answer<v1::RevokeCertificateResponse> {
        let who = principal(&request)?;
        let serial = &request.get_ref().serial;
        let revoked = self.sessions.revoke_certificate(&who, serial).await;
        revoked.map_err(engine_status)?;
        Ok(Response::new(v1::RevokeCertificateResponse {}))
    }

    async fn list_audit(
        &self,
        request: Request<v1::ListAuditRequest>,
    ) -> Answer<v1::ListAuditResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let query = AuditQuery {
            principal: (!request.principal.is_empty()).then_some(request.principal),
            since: (request.since_unix_ms > 0).then_some(request.since_unix_ms),
            limit: request.limit,
        };
        let rows = self.sessions.audit(&who, &query).await;
        let rows = rows.map_err(engine_status)?.into_iter().map(row).collect();
        Ok(Response::new(v1::ListAuditResponse { rows }))
    }
}

impl Service {
    /// A certificate that ends with its key at the latest, and its number.
    fn certificate(
        &self,
        key: &KeyId,
        request: &v1::LoginRequest,
    ) -> Result<(v1::LoginResponse, String), (Code, String)> {
        let tls = self.tls.as_ref().ok_or_else(|| {
            let message = "this server takes no clients over TLS: start it with --listen";
            (Code::Unsupported, message.to_owned())
        })?;
        if request.csr.len() > CSR_BYTES_MAX {
            let message = format!("a certificate request has at most {CSR_BYTES_MAX} bytes");
            return Err((Code::Invalid, message));
        }
        let key = self.sessions.valid_key(key);
        let key = key.map_err(|e| (e.code(), e.to_string()))?;
        let lifetime = lifetime(key.expires_at, now_ms());
        let client = ForClient {
            name: key.name.as_str(),
            key: &key.id,
            lifetime,
        };
        let signed = tls.sign(&request.csr, &client);
        let (cert, serial) = signed.map_err(|message| (Code::Invalid, message))?;
        let response = v1::LoginResponse {
            cert,
            ca_cert: tls.ca_pem().to_owned(),
            valid_days: i64::try_from(lifetime.as_secs() / DAY.as_secs()).unwrap_or(i64::MAX),
        };
        Ok((response, serial))
    }
}

/// The key that a caller came in with, by itself or as his certificate's.
fn login_key(credential: Option<&Credential>) -> Result<KeyId, Status> {
    let key = match credential {
        Some(Credential::Key(id)) => Some(id),
        Some(Credential::Certificate(certificate)) => certificate.key.as_ref(),
        Some(Credential::Kernel) | None => None,
    };
    key.cloned().ok_or_else(|| {
        to_status(
            Code::Denied,
            "missing API key: only its holder can log in; make one with `k8e apikey create`",
        )
    })
}

fn lifetime(key_ends: Option<UnixMillis>, now: UnixMillis) -> Duration {
    let left = key_ends.map(|at| u64::try_from(at - now).unwrap_or(0));
    left.map_or(CERT_LIFETIME, |ms| {
        Duration::from_millis(ms).min(CERT_LIFETIME)
    })
}

/// What a device calls itself, fit for a line of text.
fn device(name: &str) -> String {
    let plain = |c: &char| !c.is_control();
    name.chars().filter(plain).take(DEVICE_CHARS_MAX).collect()
}

fn key(view: KeyView) -> v1::Key {
    v1::Key {
        id: view.id.to_string(),
        name: view.name.to_string(),
        principal: view.principal.to_string(),
        created_at_unix_ms: view.created_at,
        expires_at_unix_ms: view.expires_at.unwrap_or(0),
        last_used_unix_ms: view.last_used.unwrap_or(0),
        expired: view.expired,
    }
}

fn row(row: AuditRow) -> v1::AuditRow {
    v1::AuditRow {
        at_unix_ms: row.at,
        principal: row.principal,
        action: row.action,
        object: row.object,
        code: row.code,
    }
}

fn now_ms() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_ends_with_its_key() {
        assert_eq!(lifetime(None, 5), CERT_LIFETIME);
        assert_eq!(lifetime(Some(i64::MAX), 5), CERT_LIFETIME);
        assert_eq!(lifetime(Some(1005), 5), Duration::from_secs(1));
        assert_eq!(lifetime(Some(1), 5), Duration::ZERO);
    }

    #[test]
    fn a_device_is_a_line() {
        assert_eq!(device("my\nlaptop\u{1b}[2J"), "mylaptop[2J");
        assert_eq!(device(&"é".repeat(100)).chars().count(), DEVICE_CHARS_MAX);
    }
}
