//! Exposed services of live sessions. Tokens are encrypted with the key of the secrets, with session and port as associated
//! data: a row that was moved to another service cannot be decrypted.

use crate::{Store, StoreError};
use k8e_model::{Exposure, Port, ServiceToken, SessionId};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// A raw row; `None` for the fields of a damaged one.
type Sealed = (SessionId, Port, String, Vec<u8>, i64);

// === impl Store ===

impl Store {
    /// Inserts a service, or updates the address that it listens on.
    pub async fn set_exposure(&self, exposure: &Exposure) -> Result<(), StoreError> {
        let sealer = self.sealer(self.missing_key().await?).await?;
        let bound = bound_to(&exposure.session, exposure.port);
        let token = sealer.seal(bound, exposure.token.as_bytes());
        sqlx::query(
            "INSERT INTO exposures (session, port, host, token, started_at) \
             VALUES ($1, $2, $3, $4, $5) \
             ON CONFLICT (session, port) DO UPDATE SET host = $3, token = $4, started_at = $5",
        )
        .bind(exposure.session.as_str())
        .bind(i64::from(exposure.port.get()))
        .bind(exposure.host.as_str())
        .bind(token)
        .bind(exposure.started_at)
        .execute(&self.shared.write)
        .await
        .map(drop)
        .map_err(self.sql("write an exposed service"))
    }

    /// Removes a service, or without a port all services of a session.
    pub async fn remove_exposures(
        &self,
        session: &SessionId,
        port: Option<Port>,
    ) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM exposures WHERE session = $1 AND ($2 IS NULL OR port = $2)")
            .bind(session.as_str())
            .bind(port.map(|port| i64::from(port.get())))
            .execute(&self.shared.write)
            .await
            .map(drop)
            .map_err(self.sql("remove an exposed service"))
    }

    /// All services. Damaged ones, and those encrypted with another key, are removed: their client exposes them again.
    pub async fn exposures(&self) -> Result<Vec<Exposure>, StoreError> {
        let rows = sqlx::query("SELECT session, port, host, token, started_at FROM exposures")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list exposed services"))?;
        let mut exposures = Vec::new();
        for row in rows.iter().filter_map(read) {
            let (session, port) = (row.0.clone(), row.1);
            match self.opened(row).await {
                Some(exposure) => exposures.push(exposure),
                None => {
                    tracing::warn!(%session, %port, "the token of an exposed service cannot be decrypted: expose it again");
                    self.remove_exposures(&session, Some(port)).await?;
                }
            }
        }
        Ok(exposures)
    }

    async fn opened(&self, (session, port, host, sealed, started_at): Sealed) -> Option<Exposure> {
        let sealer = self.sealer(crate::secrets::Missing::IsWrong).await.ok()?;
        let token = sealer.open(bound_to(&session, port), &sealed)?;
        Some(Exposure {
            token: ServiceToken::from_bytes(&token)?,
            host: host.parse().ok()?,
            session,
            port,
            started_at,
        })
    }
}

fn read(row: &SqliteRow) -> Option<Sealed> {
    let session: String = row.try_get("session").ok()?;
    Some((
        session.parse().ok()?,
        Port::new(row.try_get("port").ok()?).ok()?,
        row.try_get("host").ok()?,
        row.try_get("token").ok()?,
        row.try_get("started_at").ok()?,
    ))
}

/// Associated data of a token: four names, so that it never equals that of a secret, which has three.
fn bound_to(session: &SessionId, port: Port) -> Vec<u8> {
    format!("\0exposure\0{session}\0{port}").into_bytes()
}
