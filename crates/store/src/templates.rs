//! Templates: names, and the images that they stand for. The layers' files are with the launcher.

use crate::{Store, StoreError};
use k8e_model::{Image, TemplateName, UnixMillis};
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

/// A template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateRecord {
    /// Its name.
    pub name: TemplateName,
    /// The image that it stands for.
    pub image: Image,
    /// What each of the image's layers takes on disk, in their order.
    pub layer_bytes: Vec<u64>,
    /// Where the image came from, for people.
    pub source: String,
    /// When it was created, or last created again.
    pub created_at: UnixMillis,
    /// Who did so.
    pub created_by: String,
}

// === impl Store ===

impl Store {
    /// Writes a template down, in place of one of that name.
    pub async fn put_template(&self, template: &TemplateRecord) -> Result<(), StoreError> {
        let name = template.name.as_str();
        let bad = |e: serde_json::Error| damaged(name, &e);
        sqlx::query(
            "INSERT INTO templates (name, image, layer_bytes, source, created_at, created_by) \
             VALUES ($1, $2, $3, $4, $5, $6) \
             ON CONFLICT (name) DO UPDATE SET \
             image = $2, layer_bytes = $3, source = $4, created_at = $5, created_by = $6",
        )
        .bind(name)
        .bind(serde_json::to_string(&template.image).map_err(bad)?)
        .bind(serde_json::to_string(&template.layer_bytes).map_err(bad)?)
        .bind(&template.source)
        .bind(template.created_at)
        .bind(&template.created_by)
        .execute(&self.shared.write)
        .await
        .map_err(self.sql("write a template"))?;
        Ok(())
    }

    /// All templates, by name; how many there may be is admission's to bound. Damaged ones are left out.
    pub async fn templates(&self) -> Result<Vec<TemplateRecord>, StoreError> {
        let rows = sqlx::query("SELECT * FROM templates ORDER BY name")
            .fetch_all(&self.shared.read)
            .await
            .map_err(self.sql("list templates"))?;
        let readable = |row: &SqliteRow| {
            read(row)
                .inspect_err(|error| tracing::error!("{error}: it is left out"))
                .ok()
        };
        Ok(rows.iter().filter_map(readable).collect())
    }

    /// Forgets a template.
    pub async fn delete_template(&self, name: &TemplateName) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM templates WHERE name = $1")
            .bind(name.as_str())
            .execute(&self.shared.write)
            .await
            .map_err(self.sql("delete a template"))?;
        Ok(())
    }
}

fn read(row: &SqliteRow) -> Result<TemplateRecord, StoreError> {
    let name: String = row.try_get("name").map_err(|e| damaged("?", &e))?;
    let bad = |what: &dyn std::fmt::Display| damaged(&name, what);
    let text = |column: &str| row.try_get::<String, _>(column).map_err(|e| bad(&e));
    let image: Image = serde_json::from_str(&text("image")?).map_err(|e| bad(&e))?;
    let layer_bytes: Vec<u64> = serde_json::from_str(&text("layer_bytes")?).map_err(|e| bad(&e))?;
    if layer_bytes.len() != image.layers.len() {
        return Err(bad(&"its layers and their sizes do not match"));
    }
    Ok(TemplateRecord {
        name: name.parse().map_err(|e| bad(&e))?,
        image,
        layer_bytes,
        source: text("source")?,
        created_at: row.try_get("created_at").map_err(|e| bad(&e))?,
        created_by: text("created_by")?,
    })
}

fn damaged(name: &str, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::TemplateRecord {
        name: name.to_owned(),
        what: what.to_string(),
    }
}
