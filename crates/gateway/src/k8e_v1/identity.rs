//! `k8e.v1.Identity`: API keys, certificates and the audit log.

use super::{Answer, engine_status, model_status};
use crate::auth::login::Login;
use crate::auth::principal;
use k8e_api::v1::identity_server::Identity;
use k8e_api::{convert, v1};
use k8e_engine::{AuditQuery, AuditRow, KeyView, NewKey, Sessions};
use k8e_model::Tenants;
use tonic::{Request, Response};

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
    pub(super) login: Login,
}

// === impl Service ===

#[tonic::async_trait]
impl Identity for Service {
    async fn login(&self, request: Request<v1::LoginRequest>) -> Answer<v1::LoginResponse> {
        let asked = request.get_ref();
        let granted = self.login.grant(&request, &asked.csr, &asked.device_name)?;
        Ok(Response::new(v1::LoginResponse {
            cert: granted.cert,
            ca_cert: granted.ca_cert,
            valid_days: granted.valid_days,
        }))
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
            tenants: Tenants::parse(&request.tenants).map_err(model_status)?,
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

fn key(view: KeyView) -> v1::Key {
    v1::Key {
        id: view.id.to_string(),
        name: view.name.to_string(),
        principal: view.principal.to_string(),
        created_at_unix_ms: view.created_at,
        expires_at_unix_ms: view.expires_at.unwrap_or(0),
        last_used_unix_ms: view.last_used.unwrap_or(0),
        expired: view.expired,
        tenants: view.tenants.entries(),
    }
}

fn row(row: AuditRow) -> v1::AuditRow {
    v1::AuditRow {
        at_unix_ms: row.at,
        principal: row.principal,
        key_id: row.key,
        source: row.source,
        action: row.action,
        object: row.object,
        code: row.code,
    }
}
