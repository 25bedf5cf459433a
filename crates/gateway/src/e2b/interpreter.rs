//! The code interpreter (port 49999): executions as streams of JSON lines, and contexts.
//!
//! As with E2B, contexts are listed, made, restarted and removed by whoever knows the sandbox's id, which cannot be
//! guessed: its clients send no token with these calls. Running code needs the access token.

use super::body::{self, Answer, BoxError, Upload};
use super::control::now_ms;
use super::envd::{ACCESS_TOKEN, Authenticated};
use super::error::Failure;
use super::time::rfc3339;
use super::user::User;
use super::{Api, Client};
use crate::text::Joiner;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::{Request, StatusCode};
use k8e_engine::{ContextChoice, ContextSpec, ContextView, Execute, Execution, ExecutionEvent};
use k8e_model::{ClientKind, Code, Env, Language, Principal, SessionId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;
use tokio::time::timeout;

/// Silence after which a line is sent, so that a client that has left is noticed: as E2B's server.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// E2B's default contexts are there from the start; here their kernels start with the first use.
const DEFAULTS: [Language; 2] = [Language::Python, Language::Node];

/// Names of fields for MIME types; others are `extra`.
const FIELDS: [(&str, &str); 12] = [
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

#[derive(Debug, Deserialize)]
struct ExecuteRequest {
    code: String,
    context_id: Option<String>,
    language: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
struct ContextRequest {
    language: Option<String>,
    cwd: Option<String>,
}

/// Serves a request to the port of the code interpreter.
pub(super) async fn serve(
    api: &Api,
    id: SessionId,
    request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let path = request.uri().path().replace("//", "/");
    if path == "/health" {
        let kind = HeaderValue::from_static("text/plain");
        return Ok(body::full(StatusCode::OK, kind, "OK"));
    }
    let token = request.headers().get(ACCESS_TOKEN);
    let who = match token.map(|token| token.to_str().unwrap_or_default()) {
        Some(token) => {
            let who = api
                .sessions
                .verify_access_token(&id, &ClientKind::e2b(), token);
            who.ok_or_else(|| Failure::unauthenticated("invalid access token"))?
        }
        None if path == "/execute" => {
            return Err(Failure::unauthenticated(
                "missing access token (X-Access-Token)",
            ));
        }
        None => {
            let owner = api.sessions.owner_of(&id);
            Principal::token_holder(&owner.ok_or_else(|| Failure::gone(&id))?)
        }
    };
    let call = Authenticated::admitted(api, id, who, request.method(), &path, client)?;
    let context = path.strip_prefix("/contexts/");
    match (request.method().as_str(), path.as_str(), context) {
        ("POST", "/execute", _) => execute(&call, Upload(request.into_body())).await,
        ("GET", "/contexts", _) => list(&call).await,
        ("POST", "/contexts", _) => create(&call, Upload(request.into_body())).await,
        ("POST", _, Some(context)) => {
            let context = context
                .strip_suffix("/restart")
                .ok_or_else(|| none(&path))?;
            let sessions = &call.api.sessions;
            let restarted = sessions.restart_context(&call.who, &call.id, context).await;
            restarted.map_err(|error| call.failed(&error))?;
            body::json(StatusCode::OK, &Value::Null)
        }
        ("DELETE", _, Some(context)) => {
            let sessions = &call.api.sessions;
            let removed = sessions.remove_context(&call.who, &call.id, context).await;
            removed.map_err(|error| call.failed(&error))?;
            body::json(StatusCode::OK, &Value::Null)
        }
        _ => Err(none(&path)),
    }
}

fn none(path: &str) -> Failure {
    Failure::not_found(format!("no such call of the code interpreter: {path}"))
}

async fn execute(call: &Authenticated<'_>, upload: Upload) -> Result<Answer, Failure> {
    let request: ExecuteRequest = upload.json().await?;
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let context = match (given(request.context_id), given(request.language)) {
        (Some(_), Some(_)) => {
            return Err(Failure::invalid(
                "context_id and language: only one of them can be given",
            ));
        }
        (Some(id), None) => ContextChoice::Id(id),
        (None, language) => ContextChoice::Default(spec(language.as_deref(), None)?),
    };
    let execute = Execute {
        context,
        code: request.code,
        env: Env::try_from(request.env_vars.unwrap_or_default())?,
    };
    let started = call
        .api
        .sessions
        .execute(&call.who, &call.id, execute)
        .await;
    let lines = Lines {
        execution: Some(started.map_err(|error| call.failed(&error))?),
        stdout: Joiner::default(),
        stderr: Joiner::default(),
    };
    let kind = HeaderValue::from_static("application/x-ndjson");
    let stream = futures::stream::unfold(lines, |mut lines| async move {
        let line = lines.next().await?;
        Some((Ok::<_, BoxError>(line), lines))
    });
    Ok(body::streamed(kind, stream))
}

async fn list(call: &Authenticated<'_>) -> Result<Answer, Failure> {
    let defaults = DEFAULTS.map(|language| of_language(language, None)).into();
    let sessions = &call.api.sessions;
    let listed = sessions.list_contexts(&call.who, &call.id, defaults).await;
    let listed = listed.map_err(|error| call.failed(&error))?;
    let listed: Vec<Value> = listed.iter().map(described).collect();
    body::json(StatusCode::OK, &listed)
}

async fn create(call: &Authenticated<'_>, upload: Upload) -> Result<Answer, Failure> {
    let request: ContextRequest = upload.json().await?;
    let spec = spec(request.language.as_deref(), request.cwd.as_deref())?;
    let sessions = &call.api.sessions;
    let cwd = User::User.path(&spec.cwd)?;
    let found = sessions.stat_target(&call.who, &call.id, &cwd).await;
    found.map_err(|error| match error.code() == Code::NotFound {
        true => Failure::invalid(format!("cwd '{}' does not exist", spec.cwd)),
        false => call.failed(&error),
    })?;
    let created = sessions.create_context(&call.who, &call.id, spec).await;
    let created = created.map_err(|error| call.failed(&error))?;
    body::json(StatusCode::OK, &described(&created))
}

fn described(context: &ContextView) -> Value {
    let language = match context.spec.language {
        Language::Python => "python",
        Language::Node => "javascript",
        Language::Ts => "typescript",
        Language::Bash => "bash",
    };
    json!({ "id": context.id, "language": language, "cwd": context.spec.cwd })
}

fn spec(language: Option<&str>, cwd: Option<&str>) -> Result<ContextSpec, Failure> {
    let language = language.unwrap_or_default().trim().to_lowercase();
    let language = match language.as_str() {
        "" | "python" => Language::Python,
        "javascript" | "js" => Language::Node,
        "typescript" | "ts" => Language::Ts,
        "bash" => Language::Bash,
        other => {
            let shown: String = other.chars().take(32).collect();
            let message = format!(
                "language {shown:?}: this server runs python, javascript, typescript and bash"
            );
            return Err(Failure::new(StatusCode::NOT_IMPLEMENTED, message));
        }
    };
    Ok(of_language(language, cwd))
}

fn of_language(language: Language, cwd: Option<&str>) -> ContextSpec {
    let user = User::User;
    let cwd = cwd.filter(|cwd| !cwd.is_empty());
    ContextSpec {
        language,
        cwd: cwd.map_or_else(|| user.home().to_owned(), |cwd| user.absolute(cwd)),
        user: user.name().to_owned(),
    }
}

/// The lines of an execution.
struct Lines {
    /// None after the last line.
    execution: Option<Execution>,
    stdout: Joiner,
    stderr: Joiner,
}

// === impl Lines ===

impl Lines {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let execution = self.execution.as_mut()?;
            let line = match timeout(KEEPALIVE, execution.next()).await {
                Err(_) => line(&json!({ "type": "keepalive" })),
                Ok(Some(event)) => match self.event(event) {
                    Some(line) => line,
                    None => continue,
                },
                Ok(None) => {
                    self.execution = None;
                    let rest = [
                        output("stdout", &self.stdout.finish()),
                        output("stderr", &self.stderr.finish()),
                        Some(line(&json!({ "type": "end_of_execution" }))),
                    ];
                    rest.into_iter().flatten().collect()
                }
            };
            return Some(Bytes::from(line));
        }
    }

    fn event(&mut self, event: ExecutionEvent) -> Option<String> {
        match event {
            ExecutionEvent::Started { count } => Some(line(
                &json!({ "type": "number_of_executions", "execution_count": count }),
            )),
            ExecutionEvent::Stdout(data) => output("stdout", &self.stdout.push(&data)),
            ExecutionEvent::Stderr(data) => output("stderr", &self.stderr.push(&data)),
            ExecutionEvent::Result { main, data } => Some(result(main, &data)),
            ExecutionEvent::Error {
                name,
                value,
                traceback,
            } => Some(line(&json!({
                "type": "error",
                "name": name,
                "value": value,
                "traceback": traceback,
            }))),
        }
    }
}

/// A character that is not complete yet makes no line.
fn output(kind: &str, text: &str) -> Option<String> {
    let timestamp = rfc3339(now_ms());
    (!text.is_empty()).then(|| line(&json!({ "type": kind, "text": text, "timestamp": timestamp })))
}

fn line(value: &Value) -> String {
    one_ascii_line(&value.to_string())
}

/// A result: known MIME types have fields of their own. JSON is passed on as it is, without building it in memory.
fn result(main: bool, data: &[(String, String)]) -> String {
    let (mut fields, mut extra) = (String::new(), String::new());
    for (mime, text) in data {
        let known = FIELDS.iter().find(|(known, _)| known == mime);
        let (into, name) = match known {
            Some((_, field)) => (&mut fields, *field),
            None => (&mut extra, mime.as_str()),
        };
        let is_json = mime == "application/json" || mime.ends_with("+json");
        let value = match is_json || mime.starts_with("e2b/") {
            true if serde_json::from_str::<IgnoredAny>(text).is_ok() => text.clone(),
            // Clients expect an object there.
            true if mime.starts_with("e2b/") => continue,
            true | false => {
                Value::from(if name == "text" { unquoted(text) } else { text }).to_string()
            }
        };
        let _ = write!(into, "{}:{value},", Value::from(name));
    }
    if !extra.is_empty() {
        let _ = write!(fields, "\"extra\":{{{}}},", extra.trim_end_matches(','));
    }
    one_ascii_line(&format!(
        "{{\"type\":\"result\",{fields}\"is_main_result\":{main}}}"
    ))
}

/// Without one pair of quotes around it, as E2B shows texts.
fn unquoted(text: &str) -> &str {
    let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('\'').or_else(|| inner('"')).unwrap_or(text)
}

/// JSON with all but ASCII escaped: E2B's Python client takes some other characters for ends of lines, and its
/// JavaScript client breaks characters that are cut by the network. Outside of texts line ends are spaces.
fn one_ascii_line(json: &str) -> String {
    let mut line = String::with_capacity(json.len() + 1);
    for char in json.chars() {
        match char {
            '\n' | '\r' => line.push(' '),
            char if char.is_ascii() => line.push(char),
            char => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    let _ = write!(line, "\\u{unit:04x}");
                }
            }
        }
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(data: &[(&str, &str)]) -> Vec<(String, String)> {
        data.iter()
            .map(|(mime, text)| ((*mime).to_owned(), (*text).to_owned()))
            .collect()
    }

    #[test]
    fn results_are_written_as_clients_expect() {
        let data = pairs(&[
            ("text/plain", "'é\u{2028}😀'"),
            ("application/json", "{\"a\":\n[1]}"),
            ("e2b/chart", "no json"),
            ("application/x", "y"),
            ("application/vnd.z+json", "{}"),
        ]);
        assert_eq!(
            result(true, &data),
            "{\"type\":\"result\",\"text\":\"\\u00e9\\u2028\\ud83d\\ude00\",\"json\":{\"a\": [1]},\"extra\":{\"application/x\":\"y\",\"application/vnd.z+json\":{}},\"is_main_result\":true}\n"
        );
        assert_eq!(
            result(false, &[]),
            "{\"type\":\"result\",\"is_main_result\":false}\n"
        );
        let broken = pairs(&[("application/json", "{\"a\":1}, \"type\":\"error\"")]);
        let line: Value = serde_json::from_str(&result(true, &broken)).unwrap();
        assert_eq!(line["type"], "result");
    }

    #[test]
    fn texts_lose_one_pair_of_quotes() {
        assert_eq!(unquoted("'a'"), "a");
        assert_eq!(unquoted("\"a'\""), "a'");
        assert_eq!(unquoted("'"), "'");
        assert_eq!(unquoted("a"), "a");
    }

    #[test]
    fn languages_are_known_by_their_names() {
        let of = |language| spec(Some(language), None).map(|spec| spec.language).ok();
        assert_eq!(of(" JS "), Some(Language::Node));
        assert_eq!(of(""), Some(Language::Python));
        assert_eq!(of("r"), None);
        assert_eq!(spec(None, Some("a")).unwrap().cwd, "/home/user/a");
    }
}
