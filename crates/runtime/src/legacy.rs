//! HTTP handlers of the legacy runtime API (port 8888): execute, upload, download, list, exists.

mod shlex;

use crate::agent::Failure;
use crate::config::EXEC_TIMEOUT_MAX;
use crate::http::{self, Body, Upload, UploadError, json};
use crate::multipart::{Multipart, MultipartError, boundary};
use crate::path::{beneath_root, decode};
use crate::run::{add_line, run};
use crate::shared::Shared;
use crate::store::{Source, StoreError, store};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use k8e_wire::proto::ErrorCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;

/// Largest body of `/execute`: more than the kernel allows for the arguments of a process.
const EXECUTE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Exit code of a command that timed out, as of `timeout(1)`.
const TIMED_OUT: i32 = 124;

/// Exit code of a command that could not be started, as the API defines it.
const NOT_STARTED: i32 = 1;

#[derive(Deserialize)]
struct Execute {
    command: String,
    timeout_seconds: Option<f64>,
}

#[derive(Default, Serialize)]
struct Executed {
    stdout: String,
    stderr: String,
    exit_code: i32,
    timed_out: bool,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    size: u64,
    r#type: &'static str,
    mod_time: f64,
}

/// An error response.
enum Refused {
    /// The guest refused the call; sent as `{"message": …}`.
    Failure(Failure),
    /// The request is not valid; sent as `{"detail": …}`.
    Status(StatusCode, String),
}

/// Routes and serves one request.
pub(crate) async fn answer(shared: &Shared, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let route = path.trim_start_matches('/');
    let (name, rest) = route.split_once('/').unwrap_or((route, ""));
    let answered = match (request.method(), name) {
        (&Method::GET, "") => Ok(health(shared)),
        (&Method::POST, "execute") => execute(shared, request).await,
        (&Method::POST, "upload") => upload(shared, request).await,
        (&Method::GET, "download") => download(shared, rest).await,
        (&Method::GET, "list") => list(shared, rest).await,
        (&Method::GET, "exists") => exists(shared, rest).await,
        (_, "" | "execute" | "upload" | "download" | "list" | "exists") => {
            let message = "Method Not Allowed".to_owned();
            Err(Refused::Status(StatusCode::METHOD_NOT_ALLOWED, message))
        }
        _ => Err(Refused::Status(
            StatusCode::NOT_FOUND,
            "Not Found".to_owned(),
        )),
    };
    answered.unwrap_or_else(|refused| refused.response())
}

fn health(shared: &Shared) -> Response<Body> {
    if shared.is_stopping() {
        let told = json!({"status": "stopping", "message": "Sandbox Runtime is stopping."});
        return json(StatusCode::SERVICE_UNAVAILABLE, &told);
    }
    let told = json!({"status": "ok", "message": "Sandbox Runtime is active."});
    json(StatusCode::OK, &told)
}

async fn execute(shared: &Shared, request: Request<Incoming>) -> Result<Response<Body>, Refused> {
    // As the original server. Also, a web page cannot send this type cross-origin without a CORS preflight.
    let kind = request.headers().get(CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json")) {
        let detail = "send JSON, with content-type: application/json";
        return Err(unprocessable(detail.to_owned()));
    }
    let mut upload = Upload::new(request, EXECUTE_BYTES_MAX, shared.config.http_idle_timeout);
    let body = upload.whole().await?;
    let asked: Execute = serde_json::from_slice(&body).map_err(|e| unprocessable(e.to_string()))?;
    let limit = match asked.timeout_seconds {
        None => shared.config.exec_timeout,
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|limit| !limit.is_zero())
            .map(|limit| Some(limit.min(EXEC_TIMEOUT_MAX)))
            .ok_or_else(|| unprocessable("timeout_seconds: a number above 0".to_owned()))?,
    };
    match execute_line(shared, &asked.command, limit).await {
        Ok(executed) => Ok(json(StatusCode::OK, &executed)),
        // Not an error of the command: the client may retry.
        Err(failure) if failure.is_stopping() || failure.code == ErrorCode::Exhausted => {
            let message = json!({"message": failure.message});
            Ok(json(StatusCode::SERVICE_UNAVAILABLE, &message))
        }
        Err(failure) => Ok(json(
            StatusCode::OK,
            &Executed {
                stderr: format!("Failed to execute command: {failure}"),
                exit_code: NOT_STARTED,
                ..Executed::default()
            },
        )),
    }
}

async fn execute_line(
    shared: &Shared,
    line: &str,
    limit: Option<Duration>,
) -> Result<Executed, Failure> {
    let words = shlex::split(line).map_err(|e| Failure::new(ErrorCode::Invalid, e.to_string()))?;
    let mut exec = shared.exec(words, shared.legacy_root.dir());
    // The guest takes milliseconds, and 0 is no limit.
    exec.timeout_ms = limit.map_or(0, |limit| {
        u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1)
    });
    exec.output_bytes_max = shared.config.max_output_bytes;
    let mut finished = run(shared, exec).await?;
    let notice = finished.cut_notice();
    let timed_out = finished.exited.timed_out;
    let mut exit_code = finished.exited.exit_code;
    if let Some(limit) = limit.filter(|_| timed_out) {
        exit_code = TIMED_OUT;
        let seconds = limit.as_secs_f64();
        add_line(
            &mut finished.stderr,
            &format!("Command timed out after {seconds} seconds\n"),
        );
    }
    if let Some(notice) = notice {
        add_line(&mut finished.stderr, &notice);
    }
    Ok(Executed {
        stdout: String::from_utf8_lossy(&finished.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&finished.stderr).into_owned(),
        exit_code,
        timed_out,
    })
}

async fn upload(shared: &Shared, request: Request<Incoming>) -> Result<Response<Body>, Refused> {
    let kind = request.headers().get(CONTENT_TYPE);
    let boundary = kind
        .and_then(|kind| boundary(kind.to_str().ok()?))
        .ok_or_else(|| {
            unprocessable("send the file as multipart/form-data, in a field named file".to_owned())
        })?;
    let config = &shared.config;
    let body = Upload::new(request, config.max_upload_bytes, config.http_idle_timeout);
    let mut form = Multipart::new(body, &boundary);
    let destination = destination(&mut form).await;
    let mut source = Source::Form(form);
    let stored = match destination {
        Ok((name, path)) => store(&shared.legacy_root, &path, 0, &mut source)
            .await
            .map(|()| name)
            .map_err(Refused::from),
        Err(refused) => Err(refused),
    };
    source.discard().await;
    let message = format!("File '{}' uploaded successfully.", stored?);
    Ok(json(StatusCode::OK, &json!({"message": message})))
}

/// File name of the part `file`, and its path beneath the root.
async fn destination(form: &mut Multipart) -> Result<(String, Vec<u8>), Refused> {
    let part = form.find("file").await?;
    let name = part
        .and_then(|part| part.filename)
        .filter(|name| !name.is_empty())
        .ok_or_else(|| unprocessable("there is no field named file with a file name".to_owned()))?;
    let path = beneath_root(name.as_bytes())?;
    Ok((name, path))
}

async fn download(shared: &Shared, rest: &str) -> Result<Response<Body>, Refused> {
    let path = beneath_root(&decode(rest))?;
    match shared.legacy_root.read(&path, 0, 0).await {
        Ok((info, reading)) => {
            let length = Some(info.size).filter(|size| *size > 0);
            Ok(http::content(reading, length))
        }
        Err(failure) if is_missing(&failure) => Err(not_found("File not found")),
        Err(failure) => Err(failure.into()),
    }
}

async fn list(shared: &Shared, rest: &str) -> Result<Response<Body>, Refused> {
    let path = beneath_root(&decode(rest))?;
    let (listed, whole) = match http::entries(&shared.legacy_root, &path).await {
        Err(failure) if is_missing(&failure) => return Err(not_found("Directory not found")),
        listed => listed?,
    };
    let entry = |(name, info): (String, k8e_wire::proto::FileInfo)| Entry {
        name,
        size: info.size,
        r#type: http::type_name(&info),
        mod_time: Duration::from_nanos(info.mtime_unix_ns.unsigned_abs()).as_secs_f64()
            * if info.mtime_unix_ns < 0 { -1.0 } else { 1.0 },
    };
    let entries: Vec<Entry> = listed.into_iter().map(entry).collect();
    let mut response = json(StatusCode::OK, &entries);
    if !whole {
        let headers = response.headers_mut();
        headers.insert("x-sandbox-truncated", HeaderValue::from_static("true"));
    }
    Ok(response)
}

async fn exists(shared: &Shared, rest: &str) -> Result<Response<Body>, Refused> {
    let path = decode(rest);
    let found = shared.legacy_root.stat(&beneath_root(&path)?).await;
    let exists = match found {
        Ok(_) => true,
        Err(failure) if is_missing(&failure) => false,
        Err(failure) => return Err(failure.into()),
    };
    let path = String::from_utf8_lossy(&path);
    Ok(json(
        StatusCode::OK,
        &json!({"path": path, "exists": exists}),
    ))
}

/// Whether there is no file, or no directory, at the path.
fn is_missing(failure: &Failure) -> bool {
    matches!(
        failure.code,
        ErrorCode::NotFound | ErrorCode::NotDirectory | ErrorCode::IsDirectory
    )
}

fn not_found(message: &str) -> Refused {
    Refused::Failure(Failure::new(ErrorCode::NotFound, message))
}

fn unprocessable(detail: String) -> Refused {
    Refused::Status(StatusCode::UNPROCESSABLE_ENTITY, detail)
}

// === impl Refused ===

impl Refused {
    fn response(self) -> Response<Body> {
        match self {
            Self::Status(status, detail) => json(status, &json!({"detail": detail})),
            Self::Failure(failure) => {
                let status = match failure.code {
                    ErrorCode::Outside | ErrorCode::Permission => StatusCode::FORBIDDEN,
                    ErrorCode::NotFound | ErrorCode::NotDirectory => StatusCode::NOT_FOUND,
                    ErrorCode::Invalid | ErrorCode::IsDirectory | ErrorCode::Exists => {
                        StatusCode::BAD_REQUEST
                    }
                    ErrorCode::Exhausted => StatusCode::INSUFFICIENT_STORAGE,
                    ErrorCode::Unspecified => StatusCode::SERVICE_UNAVAILABLE,
                    ErrorCode::NoProgram | ErrorCode::Io | ErrorCode::Precondition => {
                        StatusCode::INTERNAL_SERVER_ERROR
                    }
                };
                json(status, &json!({"message": failure.message}))
            }
        }
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<UploadError> for Refused {
    fn from(error: UploadError) -> Self {
        let status = match error {
            UploadError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            UploadError::Idle(_) => StatusCode::REQUEST_TIMEOUT,
            UploadError::Broken => StatusCode::BAD_REQUEST,
        };
        Self::Status(status, error.to_string())
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Failure(failure) => failure.into(),
            StoreError::Source(error) => error.into(),
        }
    }
}

impl From<MultipartError> for Refused {
    fn from(error: MultipartError) -> Self {
        match error {
            MultipartError::Upload(error) => error.into(),
            MultipartError::Malformed(_) => {
                Self::Status(StatusCode::BAD_REQUEST, error.to_string())
            }
        }
    }
}
