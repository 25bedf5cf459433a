//! The control API: sandboxes and templates, authenticated by an API key in `X-API-Key`.

use super::body::{self, Answer, Upload};
use super::create;
use super::error::Failure;
use super::fork;
use super::query::Query;
use super::target::sandbox_id;
use super::time::rfc3339;
use super::{Api, Client};
use crate::rate_limit::Class;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode};
use k8e_engine::{Error, ListFilter, SessionView};
use k8e_model::{ClientKind, EgressPolicy, Phase, Principal, SessionId};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;

/// The level of `envd` that is implemented: E2B's clients switch features on by it.
pub(super) const ENVD_VERSION: &str = "0.6.4";

/// Seconds that a sandbox lives when a request says nothing.
pub(super) const TIMEOUT_DEFAULT_S: i64 = 300;

/// Entries of one page of a listing.
const PAGE_MAX: usize = 100;

/// Events of one page of logs.
const LOGS_MAX: u32 = 1000;

#[derive(Deserialize)]
struct TimeoutBody {
    timeout: Option<i64>,
}

#[derive(Deserialize)]
struct RefreshBody {
    duration: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PauseBody {
    memory: Option<bool>,
}

/// One authenticated call.
pub(super) struct Call<'a> {
    pub(super) api: &'a Api,
    pub(super) who: Principal,
    query: Query,
}

/// Authenticates and serves one request.
pub(super) async fn serve(
    api: &Api,
    request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let path = request.uri().path().to_owned();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if parts == ["health"] {
        return Ok(body::empty(StatusCode::OK));
    }
    let key = request.headers().get("x-api-key");
    let key = key.map(|key| key.to_str().unwrap_or_default());
    let class = match *request.method() == Method::GET {
        true => Class::Read,
        false => Class::Write,
    };
    let who = api.authenticator.admit_key(client.address, key, class);
    let who = who.map_err(|status| {
        let http = match status.code() == tonic::Code::ResourceExhausted {
            true => StatusCode::TOO_MANY_REQUESTS,
            false => StatusCode::UNAUTHORIZED,
        };
        Failure::new(http, status.message())
    })?;
    if client.slot.authenticate().is_err() {
        return Err(Failure::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many connections: use fewer at once",
        ));
    }
    let call = Call {
        api,
        who,
        query: Query::of(request.uri()),
    };
    let method = request.method().clone();
    let upload = Upload(request.into_body());
    // Versions differ in what a request may leave out, not in what it means.
    match (method.as_str(), &parts[..]) {
        ("POST", ["sandboxes"] | ["v2", "sandboxes"]) => create::create(&call, upload).await,
        ("GET", ["sandboxes"]) => call.list(true).await,
        ("GET", ["v2", "sandboxes"]) => call.list(false).await,
        ("GET", ["templates"] | ["v2", "templates"]) => call.templates(),
        ("GET", ["templates", "aliases", alias]) => call.alias(alias),
        (_, ["sandboxes" | "v2", ..]) => call.of_sandbox(&method, &parts, upload).await,
        (_, ["templates" | "v3" | "snapshots", ..]) => Err(Failure::unsupported(
            "building templates, and snapshots, by the E2B API",
        )),
        (_, ["volumes" | "volumecontent", ..]) => Err(Failure::unsupported("volumes")),
        (_, ["secrets", ..]) => Err(Failure::unsupported("secrets by the E2B API")),
        _ => Err(Failure::not_found(format!(
            "no such route: {method} {path}"
        ))),
    }
}

// === impl Call ===

impl Call<'_> {
    /// Calls about one sandbox.
    async fn of_sandbox(
        &self,
        method: &Method,
        parts: &[&str],
        upload: Upload,
    ) -> Result<Answer, Failure> {
        let parts = parts.strip_prefix(&["v2"]).unwrap_or(parts);
        let Some(("sandboxes", [id, rest @ ..])) =
            parts.split_first().map(|(first, rest)| (*first, rest))
        else {
            return Err(Failure::not_found("no such route"));
        };
        let missing = || Failure::not_found(format!("sandbox {id} was not found"));
        let id = sandbox_id(id).ok_or_else(missing)?;
        match (method.as_str(), rest) {
            ("GET", []) => self.get(&id).await,
            ("DELETE", []) => {
                self.find(&id).await?;
                self.api
                    .sessions
                    .destroy(&self.who, &id)
                    .await
                    .map_err(|e| not_found_if_gone(&e))?;
                Ok(body::empty(StatusCode::NO_CONTENT))
            }
            ("POST", ["connect"]) => self.connect(&id, upload).await,
            ("POST", ["resume"]) => {
                if self.find(&id).await?.session.phase != Phase::Paused {
                    return Err(Failure::new(StatusCode::CONFLICT, "the sandbox is running"));
                }
                self.connect(&id, upload).await
            }
            ("POST", ["timeout"]) => self.set_timeout(&id, upload).await,
            ("POST", ["refreshes"]) => self.refresh(&id, upload).await,
            ("POST", ["pause"]) => self.pause(&id, upload).await,
            ("GET", ["logs"]) => self.logs(&id).await,
            ("PUT", ["network"]) => self.set_network(&id, upload).await,
            ("GET", ["metrics"]) => self.metrics(&id).await,
            ("POST", ["snapshots"]) => Err(Failure::unsupported("snapshots by the E2B API")),
            ("POST", ["fork"]) => {
                self.find(&id).await?;
                fork::fork(self, &id, upload).await
            }
            _ => Err(Failure::not_found("no such route")),
        }
    }

    /// One of the caller's sandboxes that has not ended.
    async fn find(&self, id: &SessionId) -> Result<SessionView, Failure> {
        let missing = || Failure::not_found(format!("sandbox {id} was not found"));
        let view = self.api.sessions.get(&self.who, id).await;
        let view = view.map_err(|error| not_found_if_gone(&error))?;
        let alive = matches!(view.session.phase, Phase::Active | Phase::Paused);
        match alive && view.session.client == ClientKind::e2b() {
            true => Ok(view),
            false => Err(missing()),
        }
    }

    async fn get(&self, id: &SessionId) -> Result<Answer, Failure> {
        let view = self.find(id).await?;
        let mut detail = described(&view);
        detail["envdAccessToken"] = self.api.sessions.access_token(&self.who, id).await?.into();
        detail["domain"] = self.api.domain.as_str().into();
        detail["lifecycle"] = json!({ "autoResume": false, "onTimeout": "kill" });
        detail["allowInternetAccess"] = (view.session.egress != EgressPolicy::None).into();
        body::json(StatusCode::OK, &detail)
    }

    async fn list(&self, running_only: bool) -> Result<Answer, Failure> {
        let states = self.query.list("state");
        if let Some(unknown) = states
            .iter()
            .find(|state| !matches!(**state, "running" | "paused"))
        {
            return Err(Failure::invalid(format!(
                "state {unknown:?}: use running or paused"
            )));
        }
        let wanted = |phase: Phase| match running_only {
            true => phase == Phase::Active,
            false => states.is_empty() || states.contains(&state(phase)),
        };
        let metadata = self.query.metadata().unwrap_or_default();
        let limit = match self.query.get("limit") {
            None => PAGE_MAX,
            Some(text) => match text.parse() {
                Ok(limit @ 1..=PAGE_MAX) => limit,
                _ => return Err(Failure::invalid(format!("limit must be 1 to {PAGE_MAX}"))),
            },
        };
        let mut views = Vec::new();
        for phase in [Phase::Active, Phase::Paused] {
            let filter = ListFilter {
                phase: Some(phase),
                tenant: None,
            };
            views.extend(self.api.sessions.list(&self.who, filter).await?);
        }
        views.retain(|view| view.session.client == ClientKind::e2b());
        let running = views
            .iter()
            .filter(|view| view.session.phase == Phase::Active)
            .count();
        let labels = |view: &SessionView, name: &String, value: &String| {
            view.session
                .labels
                .iter()
                .any(|(key, have)| key == name && have == value)
        };
        views.retain(|view| {
            wanted(view.session.phase)
                && metadata.iter().all(|(key, value)| labels(view, key, value))
        });
        // Newest first, as the engine lists each phase; the id decides between two of one millisecond.
        views.sort_by(|a, b| place(b).cmp(&place(a)));
        if let Some(token) = self
            .query
            .get("nextToken")
            .filter(|token| !token.is_empty())
        {
            let after = cursor(token).ok_or_else(|| Failure::invalid("invalid nextToken"))?;
            views.retain(|view| place(view) < (after.0, &after.1));
        }
        let more = views.len() > limit;
        views.truncate(limit);
        let listed: Vec<Value> = views.iter().map(described).collect();
        let mut answer = body::json(StatusCode::OK, &listed)?;
        let headers = answer.headers_mut();
        if let Some(last) = views.last().filter(|_| more) {
            let token = format!("{}_{}", last.session.created_at, last.session.id);
            if let Ok(token) = HeaderValue::from_str(&token) {
                headers.insert("x-next-token", token);
            }
        }
        headers.insert("x-total-running", running.into());
        Ok(answer)
    }

    /// Connects to a sandbox; resumes it if it is paused. Its end is moved later, never sooner.
    async fn connect(&self, id: &SessionId, upload: Upload) -> Result<Answer, Failure> {
        let asked: TimeoutBody = upload.json().await?;
        let seconds = asked.timeout.unwrap_or(TIMEOUT_DEFAULT_S);
        let after = Duration::from_secs(create::checked_timeout(seconds)?);
        let view = self.find(id).await?;
        let paused = view.session.phase == Phase::Paused;
        if paused {
            match self.api.sessions.resume(&self.who, id).await {
                // A concurrent call resumed it.
                Ok(_) | Err(Error::NotPaused { .. }) => {}
                Err(error) => return Err(not_found_if_gone(&error)),
            }
        }
        let later = view
            .expires_at
            .is_none_or(|at| at < now_ms() + millis(after));
        if paused || later {
            let set = self.api.sessions.set_ttl(&self.who, id, Some(after)).await;
            set.map_err(|error| not_found_if_gone(&error))?;
        }
        let status = match paused {
            true => StatusCode::CREATED,
            false => StatusCode::OK,
        };
        create::sandbox(self, &view, status).await
    }

    async fn set_timeout(&self, id: &SessionId, upload: Upload) -> Result<Answer, Failure> {
        let asked: TimeoutBody = upload.json().await?;
        let seconds = asked
            .timeout
            .ok_or_else(|| Failure::invalid("timeout is missing"))?;
        // As E2B has it: a negative time is now.
        let after = create::checked_timeout(seconds.max(1))?;
        if self.find(id).await?.session.phase == Phase::Paused {
            return Err(Failure::not_found(format!(
                "sandbox {id} was not found: it is paused"
            )));
        }
        self.end_after(id, Duration::from_secs(after)).await
    }

    async fn refresh(&self, id: &SessionId, upload: Upload) -> Result<Answer, Failure> {
        let asked: RefreshBody = upload.json().await?;
        let after = create::checked_timeout(asked.duration.unwrap_or(15).max(15))?;
        let after = Duration::from_secs(after);
        let view = self.find(id).await?;
        if view
            .expires_at
            .is_some_and(|at| at >= now_ms() + millis(after))
        {
            return Ok(body::empty(StatusCode::NO_CONTENT));
        }
        self.end_after(id, after).await
    }

    async fn end_after(&self, id: &SessionId, after: Duration) -> Result<Answer, Failure> {
        let set = self.api.sessions.set_ttl(&self.who, id, Some(after)).await;
        set.map_err(|error| not_found_if_gone(&error))?;
        Ok(body::empty(StatusCode::NO_CONTENT))
    }

    /// Pauses a sandbox. It does not end while it is paused.
    async fn pause(&self, id: &SessionId, upload: Upload) -> Result<Answer, Failure> {
        let asked: PauseBody = upload.json().await?;
        if asked.memory == Some(false) {
            return Err(Failure::unsupported("a pause without memory"));
        }
        self.find(id).await?;
        let paused = self.api.sessions.pause(&self.who, id).await;
        paused.map_err(|error| not_found_if_gone(&error))?;
        let set = self.api.sessions.set_ttl(&self.who, id, None).await;
        set.map_err(|error| not_found_if_gone(&error))?;
        Ok(body::empty(StatusCode::NO_CONTENT))
    }

    async fn logs(&self, id: &SessionId) -> Result<Answer, Failure> {
        self.find(id).await?;
        let page = self.api.sessions.events(&self.who, id, 0, LOGS_MAX).await?;
        let line = |event: &k8e_engine::Event| format!("{} {}", event.kind, event.detail);
        let logs = page.events.iter();
        let logs = logs.map(|event| json!({ "timestamp": rfc3339(event.at), "line": line(event) }));
        let entries = page.events.iter().map(|event| {
            json!({ "timestamp": rfc3339(event.at), "message": line(event), "level": "info", "fields": {} })
        });
        let logs: Vec<Value> = logs.collect();
        let entries: Vec<Value> = entries.collect();
        body::json(
            StatusCode::OK,
            &json!({ "logs": logs, "logEntries": entries }),
        )
    }

    /// The newest sample, if it is in the time that is asked for. A paused sandbox has none.
    async fn metrics(&self, id: &SessionId) -> Result<Answer, Failure> {
        let number = |name| match self.query.get(name).map(str::parse::<i64>) {
            None => Ok(None),
            Some(Ok(number)) => Ok(Some(number)),
            Some(Err(_)) => Err(Failure::invalid(format!("{name} must be a Unix time"))),
        };
        let (start, end) = (number("start")?, number("end")?);
        let paused = self.find(id).await?.session.phase == Phase::Paused;
        let now = now_ms() / 1000;
        if paused || start.is_some_and(|at| at > now) || end.is_some_and(|at| at < now) {
            return body::json(StatusCode::OK, &[(); 0]);
        }
        let metrics = self.api.sessions.session_metrics(&self.who, id).await;
        let metrics = metrics.map_err(|error| not_found_if_gone(&error))?;
        body::json(StatusCode::OK, &[super::metrics::sample(&metrics)])
    }

    async fn set_network(&self, id: &SessionId, upload: Upload) -> Result<Answer, Failure> {
        let network: create::Network = upload.json().await?;
        self.find(id).await?;
        let policy = network
            .policy()?
            .unwrap_or(self.api.sessions.egress_default());
        self.api
            .sessions
            .set_allowed_hosts(&self.who, id, policy)
            .await?;
        Ok(body::empty(StatusCode::NO_CONTENT))
    }

    fn templates(&self) -> Result<Answer, Failure> {
        let described = |name: &str, at: i64| {
            json!({
                "templateID": name, "buildID": name, "cpuCount": 0, "memoryMB": 0, "diskSizeMB": 0,
                "public": true, "aliases": [name], "names": [name],
                "createdAt": rfc3339(at), "updatedAt": rfc3339(at),
                "buildStatus": "ready", "buildCount": 1, "spawnCount": 0, "envdVersion": ENVD_VERSION,
            })
        };
        let listed = self.api.sessions.list_templates();
        let mut all = vec![described(create::BASE, 0)];
        all.extend(
            listed
                .iter()
                .map(|view| described(view.record.name.as_str(), view.record.created_at)),
        );
        body::json(StatusCode::OK, &all)
    }

    fn alias(&self, alias: &str) -> Result<Answer, Failure> {
        let alias = super::query::decode(alias, false);
        let known = create::template(&alias)?;
        let exists = match &known {
            k8e_model::Template::Host => true,
            k8e_model::Template::Image { name, .. } => self.api.sessions.get_template(name).is_ok(),
        };
        match exists {
            true => body::json(
                StatusCode::OK,
                &json!({ "templateID": alias, "public": true }),
            ),
            false => Err(Failure::not_found(format!(
                "template {alias:?} was not found"
            ))),
        }
    }
}

/// A session that is over is one that does not exist, to E2B's clients.
fn not_found_if_gone(error: &Error) -> Failure {
    let over = matches!(
        error,
        Error::SessionOver { .. } | Error::SessionEnded { .. }
    );
    match over {
        true => Failure::not_found(error.to_string()),
        false => Failure::of(error),
    }
}

fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Paused => "paused",
        Phase::Creating | Phase::Active | Phase::Terminating | Phase::Ended => "running",
    }
}

/// What a listing is sorted by.
fn place(view: &SessionView) -> (i64, &str) {
    (view.session.created_at, view.session.id.as_str())
}

fn cursor(token: &str) -> Option<(i64, String)> {
    let (at, id) = token.split_once('_')?;
    Some((at.parse().ok()?, sandbox_id(id)?.to_string()))
}

/// A sandbox in a listing.
fn described(view: &SessionView) -> Value {
    let session = &view.session;
    let limits = &session.limits;
    let ends = view.expires_at.unwrap_or(session.last_used);
    let metadata: serde_json::Map<String, Value> = session
        .labels
        .iter()
        .map(|(key, value)| (key.to_owned(), value.into()))
        .collect();
    json!({
        "templateID": create::template_id(&session.template),
        "alias": create::template_id(&session.template),
        "sandboxID": session.id.as_str(),
        "clientID": create::CLIENT_ID,
        "startedAt": rfc3339(session.created_at),
        "endAt": rfc3339(ends),
        "envdVersion": ENVD_VERSION,
        "cpuCount": limits.cpu_millis.div_ceil(1000),
        "memoryMB": limits.memory_bytes >> 20,
        "diskSizeMB": limits.disk_bytes >> 20,
        "state": state(session.phase),
        "metadata": metadata,
    })
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    millis(since.unwrap_or_default())
}
