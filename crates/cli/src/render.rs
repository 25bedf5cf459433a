//! JSON output types, with the keys of the Go K8E where it has them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8e_api::v1;
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes as JSON: a string, and base64 too when they are not UTF-8.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Text {
    /// Invalid UTF-8 is replaced by U+FFFD.
    pub(crate) text: String,
    /// The exact bytes; only when they are not UTF-8.
    pub(crate) base64: Option<String>,
}

/// A session; `runtime_class` is the same as `runtime`, under the key of the Go K8E.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct SessionJson {
    pub(crate) session_id: String,
    pub(crate) tenant_id: String,
    pub(crate) owner: String,
    pub(crate) phase: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    pub(crate) runtime: String,
    runtime_class: String,
    pub(crate) template: String,
    env_keys: Vec<String>,
    secret_env_vars: Vec<String>,
    labels: BTreeMap<String, String>,
    pub(crate) limits: LimitsJson,
    pub(crate) created_at: i64,
    pub(crate) last_used: i64,
    /// Unix seconds; 0 is never.
    expires_at: i64,
    idle_timeout_s: i64,
    allowed_hosts: Vec<String>,
    network: String,
    oom_kills: u64,
    pids_refused: u64,
    background_runs: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    parent_session_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    agent_type: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cwd: String,
}

/// Resource limits of a sandbox.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LimitsJson {
    pub(crate) memory_bytes: u64,
    cpus: f64,
    pids: u32,
    disk_bytes: u64,
}

/// A file; `path`, `modified`, `type` and `size` are keys of the Go K8E.
#[derive(Debug, Serialize)]
pub(crate) struct FileJson {
    pub(crate) path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_base64: Option<String>,
    pub(crate) modified: i64,
    pub(crate) r#type: String,
    pub(crate) size: u64,
    pub(crate) mode: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) symlink_target: Option<String>,
}

// === impl Text ===

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self { text, base64: None },
            Err(error) => Self {
                text: String::from_utf8_lossy(error.as_bytes()).into_owned(),
                base64: Some(STANDARD.encode(error.as_bytes())),
            },
        }
    }
}

// === impl SessionJson ===

impl From<v1::Session> for SessionJson {
    fn from(session: v1::Session) -> Self {
        Self {
            session_id: session.session_id,
            tenant_id: session.tenant,
            owner: session.owner,
            phase: session.phase,
            reason: session.reason,
            runtime_class: session.runtime.clone(),
            runtime: session.runtime,
            template: session.template,
            env_keys: session.env_keys,
            secret_env_vars: session.secret_env_vars,
            labels: session.labels.into_iter().collect(),
            limits: session.limits.unwrap_or_default().into(),
            created_at: session.created_at_unix_ms / 1000,
            last_used: session.last_used_unix_ms / 1000,
            expires_at: session.expires_at_unix_ms / 1000,
            idle_timeout_s: session.idle_timeout_s,
            allowed_hosts: session.allowed_hosts,
            network: session.network,
            oom_kills: session.oom_kills,
            pids_refused: session.pids_refused,
            background_runs: session.background_runs,
            parent_session_id: session.parent_session_id,
            agent_type: session.agent_type,
            cwd: session.cwd,
        }
    }
}

impl SessionJson {
    /// Whether nothing but `last_used` is different.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let last_used = other.last_used;
        *other
            == Self {
                last_used,
                ..self.clone()
            }
    }
}

// === impl LimitsJson ===

impl From<v1::Limits> for LimitsJson {
    fn from(limits: v1::Limits) -> Self {
        Self {
            memory_bytes: limits.memory_bytes,
            cpus: f64::from(limits.cpu_millis) / 1000.0,
            pids: limits.pids,
            disk_bytes: limits.disk_bytes,
        }
    }
}

// === impl FileJson ===

impl From<v1::FileInfo> for FileJson {
    fn from(file: v1::FileInfo) -> Self {
        let path = Text::from(Vec::from(file.path));
        let target = Text::from(Vec::from(file.symlink_target)).text;
        Self {
            path: path.text,
            path_base64: path.base64,
            modified: file.mtime_unix_ns.div_euclid(1_000_000_000),
            r#type: file.r#type,
            size: file.size,
            mode: format!("{:04o}", file.mode & 0o7777),
            uid: file.uid,
            gid: file.gid,
            symlink_target: (!target.is_empty()).then_some(target),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_text_come_along() {
        assert_eq!(
            Text::from(b"ok".to_vec()),
            Text {
                text: "ok".into(),
                base64: None
            }
        );
        let text = Text::from(b"a\xffb".to_vec());
        assert_eq!(
            text,
            Text {
                text: "a\u{fffd}b".into(),
                base64: Some("Yf9i".into())
            }
        );
    }

    #[test]
    fn a_file_has_k8es_keys() {
        let file = v1::FileInfo {
            path: "/workspace/a".into(),
            r#type: "file".into(),
            size: 7,
            mode: 0o100_644,
            mtime_unix_ns: 1_700_000_000_999_999_999,
            ..Default::default()
        };
        let json = serde_json::to_value(FileJson::from(file)).unwrap();
        assert_eq!(json["path"], "/workspace/a");
        assert_eq!(json["modified"], 1_700_000_000);
        assert_eq!((&json["type"], &json["size"]), (&"file".into(), &7.into()));
        assert_eq!(json["mode"], "0644");
    }
}
