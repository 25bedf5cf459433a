//! Creation of a sandbox: the request, checked field by field. What this server lacks is an error, never ignored.

use super::body::{self, Answer, Upload};
use super::control::{Call, ENVD_VERSION, TIMEOUT_DEFAULT_S};
use super::error::Failure;
use hyper::StatusCode;
use k8e_engine::SessionView;
use k8e_model::{
    ClientKind, EgressPolicy, LifetimeSpec, SessionId, SessionSpec, Template, TimeLimit,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// E2B's name of the default template, here `host`.
pub(super) const BASE: &str = "base";

/// Further names of E2B's that are the default template here.
const BASE_TOO: [&str; 2] = ["code-interpreter-v1", "host"];

/// E2B's clients require the field and do not use it.
pub(super) const CLIENT_ID: &str = "k8e";

/// Longest life of a sandbox: a year, as everywhere here.
const TIMEOUT_MAX_S: i64 = 366 * 24 * 3600;

/// All traffic, in E2B's lists.
const ALL_TRAFFIC: &str = "0.0.0.0/0";

#[derive(Deserialize)]
struct NewSandbox {
    #[serde(rename = "templateID")]
    template: String,
    timeout: Option<i64>,
    metadata: Option<BTreeMap<String, String>>,
    #[serde(rename = "envVars")]
    env: Option<BTreeMap<String, String>>,
    #[serde(rename = "autoPause")]
    auto_pause: Option<bool>,
    #[serde(rename = "autoResume")]
    auto_resume: Option<AutoResume>,
    allow_internet_access: Option<bool>,
    network: Option<Network>,
    mcp: Option<Value>,
    iam: Option<Value>,
    #[serde(rename = "volumeMounts")]
    volume_mounts: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct AutoResume {
    enabled: bool,
}

/// What a sandbox may reach, and who may reach it.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Network {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    allow_public_traffic: Option<bool>,
    dns_servers: Option<Vec<String>>,
    egress_proxy: Option<Value>,
    rules: Option<BTreeMap<String, Value>>,
    mask_request_host: Option<String>,
    https_ports: Option<Vec<u16>>,
}

// === impl Network ===

impl Network {
    /// None is the server's default.
    pub(super) fn policy(&self) -> Result<Option<EgressPolicy>, Failure> {
        let lacks = [
            (
                self.allow_public_traffic == Some(false),
                "private ports (allowPublicTraffic=false)",
            ),
            (
                self.dns_servers
                    .as_ref()
                    .is_some_and(|list| !list.is_empty()),
                "own DNS servers",
            ),
            (
                self.egress_proxy
                    .as_ref()
                    .is_some_and(|proxy| !proxy.is_null()),
                "egress proxies",
            ),
            (
                self.rules.as_ref().is_some_and(|rules| !rules.is_empty()),
                "rules that change requests",
            ),
            (self.mask_request_host.is_some(), "maskRequestHost"),
            (
                self.https_ports
                    .as_ref()
                    .is_some_and(|ports| !ports.is_empty()),
                "httpsPorts",
            ),
        ];
        if let Some((_, what)) = lacks.iter().find(|(asked, _)| *asked) {
            return Err(Failure::unsupported(what));
        }
        let denied = self.deny_out.as_deref().unwrap_or_default();
        let allowed = self.allow_out.as_deref().unwrap_or_default();
        if self.allow_internet_access == Some(false) && allowed.is_empty() {
            return Ok(Some(EgressPolicy::None));
        }
        match (allowed, denied) {
            ([], []) => Ok(None),
            (allowed, [all]) if all == ALL_TRAFFIC => match allowed {
                [] => Ok(Some(EgressPolicy::None)),
                hosts => Ok(Some(EgressPolicy::parse(hosts)?)),
            },
            (_, []) => Err(Failure::invalid(format!(
                "allowOut without denyOut [{ALL_TRAFFIC:?}] allows nothing more: name both"
            ))),
            _ => Err(Failure::unsupported("a denyOut of some networks")),
        }
    }
}

/// `POST /sandboxes` and `POST /v2/sandboxes`.
pub(super) async fn create(call: &Call<'_>, upload: Upload) -> Result<Answer, Failure> {
    let asked: NewSandbox = upload.json().await?;
    let spec = spec(asked)?;
    let view = call
        .api
        .sessions
        .create(&call.who, spec)
        .await
        .map_err(|error| {
            // Not found, of a sandbox that does not exist yet, is the template.
            Failure::of(&error)
        })?;
    sandbox(call, &view, StatusCode::CREATED).await
}

/// What create and connect answer.
pub(super) async fn sandbox(
    call: &Call<'_>,
    view: &SessionView,
    status: StatusCode,
) -> Result<Answer, Failure> {
    body::json(status, &described(call, view).await?)
}

/// A sandbox that can be connected to.
pub(super) async fn described(call: &Call<'_>, view: &SessionView) -> Result<Value, Failure> {
    let session = &view.session;
    let token = call
        .api
        .sessions
        .access_token(&call.who, &session.id)
        .await?;
    let template = template_id(&session.template);
    Ok(json!({
        "templateID": template,
        "alias": template,
        "sandboxID": session.id.as_str(),
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": token,
        "domain": call.api.domain,
    }))
}

fn spec(asked: NewSandbox) -> Result<SessionSpec, Failure> {
    let lacks = [
        (
            asked.auto_pause == Some(true),
            "a pause at the timeout (autoPause)",
        ),
        (
            asked.auto_resume.is_some_and(|auto| auto.enabled),
            "resuming by a request (autoResume)",
        ),
        (asked.mcp.is_some_and(|mcp| !mcp.is_null()), "MCP servers"),
        (
            asked.iam.is_some_and(|iam| !iam.is_null()),
            "identity tokens (iam)",
        ),
        (
            asked.volume_mounts.is_some_and(|mounts| !mounts.is_empty()),
            "volumes",
        ),
    ];
    if let Some((_, what)) = lacks.iter().find(|(asked, _)| *asked) {
        return Err(Failure::unsupported(what));
    }
    let timeout = checked_timeout(asked.timeout.unwrap_or(TIMEOUT_DEFAULT_S))?;
    let id = SessionId::random_e2b();
    let mut env = asked.env.unwrap_or_default();
    // A client's own cannot override these.
    env.insert("E2B_SANDBOX".to_owned(), "true".to_owned());
    env.insert("E2B_SANDBOX_ID".to_owned(), id.to_string());
    env.insert("E2B_TEMPLATE_ID".to_owned(), asked.template.clone());
    let mut network = asked.network.unwrap_or_default();
    network.allow_internet_access = asked
        .allow_internet_access
        .or(network.allow_internet_access);
    Ok(SessionSpec {
        id: Some(id),
        client: ClientKind::e2b(),
        template: template(&asked.template)?,
        env: env.try_into()?,
        labels: asked.metadata.unwrap_or_default().try_into()?,
        lifetime: LifetimeSpec {
            ttl: TimeLimit::After(Duration::from_secs(timeout)),
            idle: TimeLimit::Never,
        },
        egress: network.policy()?,
        ..SessionSpec::default()
    })
}

/// Seconds that a sandbox may live.
pub(super) fn checked_timeout(seconds: i64) -> Result<u64, Failure> {
    match seconds {
        1..=TIMEOUT_MAX_S => Ok(seconds.unsigned_abs()),
        _ => Err(Failure::invalid(format!(
            "a timeout of {seconds} seconds: use 1 to {TIMEOUT_MAX_S}"
        ))),
    }
}

/// Ours for a name of E2B's; `:default` is the tag that is meant without one.
pub(super) fn template(name: &str) -> Result<Template, Failure> {
    let plain = name.strip_suffix(":default").unwrap_or(name);
    if plain == BASE || BASE_TOO.contains(&plain) {
        return Ok(Template::Host);
    }
    if plain.is_empty() {
        return Err(Failure::invalid("templateID is empty: base is the default"));
    }
    Ok(plain.parse()?)
}

/// E2B's name for one of ours.
pub(super) fn template_id(template: &Template) -> String {
    match template {
        Template::Host => BASE.to_owned(),
        Template::Image { name, .. } => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<SessionSpec, (u16, String)> {
        let asked = serde_json::from_str(text).unwrap();
        spec(asked).map_err(|failure| (failure.status.as_u16(), failure.message))
    }

    #[test]
    fn requests_become_specs() {
        let spec =
            parsed(r#"{"templateID":"base","metadata":{"a":"b"},"envVars":{"E2B_SANDBOX":"no"}}"#)
                .unwrap();
        assert_eq!(spec.template, Template::Host);
        let env: BTreeMap<String, String> = spec.env.into();
        assert_eq!(env["E2B_SANDBOX"], "true");
        assert_eq!(env["E2B_SANDBOX_ID"], spec.id.unwrap().to_string());
        assert_eq!(
            spec.lifetime.ttl,
            TimeLimit::After(Duration::from_secs(300))
        );
        assert_eq!(spec.egress, None);
        let off = parsed(r#"{"templateID":"base","allow_internet_access":false}"#).unwrap();
        assert_eq!(off.egress, Some(EgressPolicy::None));
        let some = r#"{"templateID":"base","network":{"allowOut":["example.com"],"denyOut":["0.0.0.0/0"]}}"#;
        assert!(
            matches!(parsed(some).unwrap().egress, Some(policy) if policy.entries() == ["example.com"])
        );
    }

    #[test]
    fn what_is_missing_is_not_ignored() {
        let status = |rest: &str| {
            let text = format!(r#"{{"templateID":"base",{rest}}}"#);
            parsed(&text).map(drop).unwrap_err().0
        };
        assert_eq!(status(r#""timeout":0"#), 400);
        assert_eq!(status(r#""timeout":-5"#), 400);
        assert_eq!(status(r#""autoPause":true"#), 501);
        assert_eq!(status(r#""autoResume":{"enabled":true}"#), 501);
        assert_eq!(status(r#""mcp":{"x":1}"#), 501);
        assert_eq!(status(r#""volumeMounts":[{"name":"a","path":"/a"}]"#), 501);
        assert_eq!(status(r#""network":{"allowPublicTraffic":false}"#), 501);
        assert_eq!(status(r#""network":{"allowOut":["example.com"]}"#), 400);
        assert_eq!(status(r#""network":{"denyOut":["10.0.0.0/8"]}"#), 501);
        assert_eq!(status(r#""envVars":{"A=B":"x"}"#), 400);
        assert!(parsed(r#"{"templateID":"../x"}"#).is_err());
    }
}
