//! `k8e.v1.Secrets`: set, listed and deleted, never read.

use super::{Answer, engine_status, model_status};
use crate::auth::principal;
use k8e_api::v1::secrets_server::Secrets;
use k8e_api::{convert, v1};
use k8e_engine::{SecretOwner, Sessions};
use tonic::{Request, Response, Status};

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
}

// === impl Service ===

#[tonic::async_trait]
impl Secrets for Service {
    async fn set_secret(
        &self,
        request: Request<v1::SetSecretRequest>,
    ) -> Answer<v1::SetSecretResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let owner = owner(&request.principal)?;
        let name = convert::secret_name(&request.name, &request.key).map_err(model_status)?;
        let value = convert::secret_value(request.value).map_err(model_status)?;
        let set = self.sessions.set_secret(&who, &owner, &name, &value).await;
        set.map_err(engine_status)?;
        Ok(Response::new(v1::SetSecretResponse {}))
    }

    async fn list_secrets(
        &self,
        request: Request<v1::ListSecretsRequest>,
    ) -> Answer<v1::ListSecretsResponse> {
        let who = principal(&request)?;
        let secrets = self.sessions.list_secrets(&who).await;
        let secrets = secrets.map_err(engine_status)?.into_iter();
        let secrets = secrets.map(|entry| v1::SecretEntry {
            owner: entry.owner,
            name: entry.secret.name().to_owned(),
            key: entry.secret.key().to_owned(),
            updated_at_unix_ms: entry.updated_at,
        });
        Ok(Response::new(v1::ListSecretsResponse {
            secrets: secrets.collect(),
        }))
    }

    async fn delete_secret(
        &self,
        request: Request<v1::DeleteSecretRequest>,
    ) -> Answer<v1::DeleteSecretResponse> {
        let who = principal(&request)?;
        let request = request.into_inner();
        let owner = owner(&request.principal)?;
        let name = convert::secret_name(&request.name, &request.key).map_err(model_status)?;
        let all = request.key.is_empty();
        let deleted = self.sessions.delete_secret(&who, &owner, &name, all).await;
        deleted.map_err(engine_status)?;
        Ok(Response::new(v1::DeleteSecretResponse {}))
    }
}

fn owner(principal: &str) -> Result<SecretOwner, Status> {
    let name = convert::principal_name(principal).map_err(model_status)?;
    Ok(name.map_or(SecretOwner::Caller, SecretOwner::Of))
}
