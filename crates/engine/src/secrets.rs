//! Secrets: set by their owner, injected into the environment of the owner's commands, never returned by an API.

use crate::recorder::now_ms;
use crate::{Error, Sessions};
use k8e_model::{Principal, PrincipalName, SecretName, SecretValue, Session};
use k8e_store::{SecretEntry, Store};

/// Secrets per owner: each is at most 32 KiB.
const SECRETS_PER_OWNER_MAX: usize = 256;

/// Owner of a secret in a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SecretOwner {
    /// The caller.
    #[default]
    Caller,
    /// The principal of an API key. Requires administrator rights.
    Of(PrincipalName),
}

// === impl Sessions ===

impl Sessions {
    /// Sets a secret. Commands that start from now on get this value.
    pub async fn set_secret(
        &self,
        who: &Principal,
        owner: &SecretOwner,
        secret: &SecretName,
        value: &SecretValue,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "secret.set", &secret.to_string());
        let set = async {
            let owner = self.secret_owner(who, owner)?;
            let max = SECRETS_PER_OWNER_MAX;
            let store = &self.shared.store;
            if store
                .set_secret(&owner, secret, value, now_ms(), max)
                .await?
            {
                return Ok(());
            }
            Err(Error::SecretsFull { max })
        };
        audit.end(set.await)
    }

    /// The caller's secrets, without their values; administrators see those of all owners.
    pub async fn list_secrets(&self, who: &Principal) -> Result<Vec<SecretEntry>, Error> {
        let owner = (!who.is_administrator()).then_some(who.name());
        Ok(self.shared.store.secrets(owner).await?)
    }

    /// Deletes a secret: the value of one key, or all values when none is named.
    pub async fn delete_secret(
        &self,
        who: &Principal,
        owner: &SecretOwner,
        secret: &SecretName,
        all: bool,
    ) -> Result<(), Error> {
        let audit = self.audited(who, "secret.delete", &secret.to_string());
        let delete = async {
            let owner = self.secret_owner(who, owner)?;
            let key = (!all).then(|| secret.key());
            let store = &self.shared.store;
            match store.delete_secret(&owner, secret.name(), key).await? {
                0 => Err(Error::SecretNotFound(secret.name().to_owned())),
                _ => Ok(()),
            }
        };
        audit.end(delete.await)
    }

    fn secret_owner(&self, who: &Principal, owner: &SecretOwner) -> Result<String, Error> {
        match owner {
            SecretOwner::Caller => Ok(who.name().to_owned()),
            SecretOwner::Of(name) => {
                self.administrator(who, "secrets of others are set and deleted")?;
                Ok(Principal::owner_of(name))
            }
        }
    }
}

/// Resolves a session's secret references to environment variables, from the secrets of the session's owner.
pub(crate) async fn resolve(
    store: &Store,
    session: &Session,
) -> Result<Vec<(String, SecretValue)>, Error> {
    let mut variables = Vec::new();
    for wanted in session.secrets.iter() {
        let value = store.secret(&session.owner, &wanted.secret).await?;
        let value = value.ok_or_else(|| Error::SecretMissing {
            secret: wanted.secret.clone(),
            env_var: wanted.env_var.clone(),
        })?;
        variables.push((wanted.env_var.clone(), value));
    }
    Ok(variables)
}
