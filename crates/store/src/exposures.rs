//! Services of live sessions that have a URL. Their tokens are sealed with the secrets' key, bound to
//! session and port: a row that was moved to another service does not open.

use crate::{Store, StoreError};
use k8e_model::{Exposure, Port, ServiceToken, SessionId};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// A row as it lies there; none of its fields when it is damaged.
type Sealed = (SessionId, Port, String, Vec<u8>, i64);

// === impl Store ===

impl Store {
    /// Writes a service down, or where it listens anew.
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

    /// Removes a service, or with no port all of a session's.
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

    /// Every service that is written down. Damaged ones, and those of another key, are removed: a
    /// URL that is lost is asked for again.
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
                    tracing::warn!(%session, %port, "the URL of an exposed service cannot be read any more: expose it again");
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

/// No secret's: those are three names, and this is four.
fn bound_to(session: &SessionId, port: Port) -> Vec<u8> {
    format!("\0exposure\0{session}\0{port}").into_bytes()
}
