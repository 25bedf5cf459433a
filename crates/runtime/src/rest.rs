//! HTTP handlers of sandboxd's API (port 8080): files beneath the root, health and metadata.

mod range;

use crate::agent::Failure;
use crate::http::{self, Body, Upload, UploadError, json};
use crate::multipart::{Multipart, MultipartError, boundary};
use crate::path::{beneath_root, decode, parameter};
use crate::shared::Shared;
use crate::store::{Source, StoreError, store};
use crate::time::{http_date, rfc3339};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_RANGES, ALLOW, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderValue, IF_RANGE,
    LAST_MODIFIED, RANGE,
};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use k8e_wire::proto::{ErrorCode, FileInfo, FileType};
use range::Range;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

const FILES: &str = "/v1/files";

/// Environment variables with one of these in their name are never shown.
const SECRET_MARKERS: &[&str] = &["TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "KEY"];

#[derive(Serialize)]
struct Entry {
    name: String,
    size: u64,
    r#type: &'static str,
    modified_at: String,
    mode: String,
}

#[derive(Serialize)]
struct Listing {
    path: String,
    entries: Vec<Entry>,
    /// Set when the directory has more than [`http::ENTRIES_MAX`] entries.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

/// An error response: HTTP status, error code of the API, and message.
struct Refused(StatusCode, &'static str, String);

/// Routes and serves one request.
pub(crate) async fn answer(shared: &Shared, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let rest = path
        .strip_prefix(FILES)
        .filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let method = request.method().clone();
    let answered = match (rest, method) {
        (Some(rest), Method::GET) => get(shared, rest, request.headers()).await,
        (Some(rest), Method::HEAD) => head(shared, rest).await,
        (Some(rest), Method::PUT) => put(shared, rest, request).await,
        (Some(rest), Method::DELETE) => delete(shared, rest, request.uri().query()).await,
        (Some(_), _) => return not_allowed("GET, HEAD, PUT, DELETE"),
        (None, Method::GET | Method::HEAD) => match path.as_str() {
            "/v1/health" => health(shared),
            "/v1/metadata" => Ok(metadata(shared)),
            _ => Err(nothing_here()),
        },
        (None, _) if matches!(path.as_str(), "/v1/health" | "/v1/metadata") => {
            return not_allowed("GET, HEAD");
        }
        (None, _) => Err(nothing_here()),
    };
    answered.unwrap_or_else(|refused| refused.response())
}

fn health(shared: &Shared) -> Result<Response<Body>, Refused> {
    if shared.is_stopping() {
        return Err(Failure::stopping().into());
    }
    let uptime_seconds = http::uptime_seconds(shared.started);
    let told = json!({"status": "ok", "uptime_seconds": uptime_seconds});
    Ok(json(StatusCode::OK, &told))
}

fn metadata(shared: &Shared) -> Response<Body> {
    let prefix = &shared.config.metadata_env_prefix;
    let text = |value: &std::ffi::OsString| value.to_string_lossy().into_owned();
    let shown = |name: &String| {
        let upper = name.to_uppercase();
        name.starts_with(prefix.as_str())
            && !SECRET_MARKERS.iter().any(|marker| upper.contains(marker))
    };
    let all = shared.config.env.iter();
    let env: BTreeMap<String, String> = all
        .map(|(name, value)| (text(name), text(value)))
        .filter(|(name, _)| shown(name))
        .collect();
    json(StatusCode::OK, &json!({"env": env}))
}

async fn get(shared: &Shared, rest: &str, headers: &HeaderMap) -> Result<Response<Body>, Refused> {
    let path = beneath_root(&decode(rest))?;
    let (info, reading) = match shared.root.read(&path, 0, 0).await {
        Err(failure) if failure.code == ErrorCode::IsDirectory => return list(shared, &path).await,
        read => read?,
    };
    // If-Range is not evaluated: such a request gets the whole file, which is always valid.
    let wanted = headers
        .get(RANGE)
        .filter(|_| !headers.contains_key(IF_RANGE));
    let wanted = wanted.and_then(|value| value.to_str().ok());
    let range = wanted.map_or(Range::Whole, |wanted| Range::parse(wanted, info.size));
    let mut response = match range {
        // A size of 0 may be unknown, as of files in /proc.
        Range::Whole => http::content(reading, Some(info.size).filter(|size| *size > 0)),
        Range::Part { first, last } => {
            drop(reading);
            let length = last - first + 1;
            let (_, reading) = shared.root.read(&path, first, length).await?;
            let mut response = http::content(reading, Some(length));
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            let of = format!("bytes {first}-{last}/{}", info.size);
            insert(&mut response, CONTENT_RANGE, &of);
            response
        }
        Range::Unsatisfiable => {
            let message = format!("the file has {} bytes", info.size);
            let refused = Refused(
                StatusCode::RANGE_NOT_SATISFIABLE,
                "INVALID_ARGUMENT",
                message,
            );
            let mut response = refused.response();
            insert(
                &mut response,
                CONTENT_RANGE,
                &format!("bytes */{}", info.size),
            );
            response
        }
    };
    describe(&mut response, &info);
    Ok(response)
}

async fn head(shared: &Shared, rest: &str) -> Result<Response<Body>, Refused> {
    let info = shared.root.stat(&beneath_root(&decode(rest))?).await?;
    let mut response = http::empty(StatusCode::OK);
    let kind = match info.r#type() {
        FileType::Directory => "application/json",
        FileType::File | FileType::Symlink | FileType::Other | FileType::Unspecified => {
            response
                .headers_mut()
                .insert(CONTENT_LENGTH, info.size.into());
            describe(&mut response, &info);
            "application/octet-stream"
        }
    };
    insert(&mut response, CONTENT_TYPE, kind);
    Ok(response)
}

async fn list(shared: &Shared, path: &[u8]) -> Result<Response<Body>, Refused> {
    let (listed, whole) = http::entries(&shared.root, path).await?;
    let entry = |(name, info): (String, FileInfo)| Entry {
        name,
        size: info.size,
        r#type: http::type_name(&info),
        modified_at: rfc3339(info.mtime_unix_ns),
        mode: format!("{:04o}", info.mode & 0o777),
    };
    let listing = Listing {
        path: format!("/{}", String::from_utf8_lossy(path)),
        entries: listed.into_iter().map(entry).collect(),
        truncated: !whole,
    };
    Ok(json(StatusCode::OK, &listing))
}

async fn put(
    shared: &Shared,
    rest: &str,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refused> {
    let destination = destination(rest, request.uri().query());
    let kind = request.headers().get(CONTENT_TYPE);
    let boundary = kind.and_then(|kind| boundary(kind.to_str().ok()?));
    let config = &shared.config;
    let body = Upload::new(request, config.max_upload_bytes, config.http_idle_timeout);
    let mut source = match boundary {
        Some(boundary) => Source::Form(Multipart::new(body, &boundary)),
        None => Source::Raw(body),
    };
    let stored = put_at(shared, destination, &mut source).await;
    source.discard().await;
    stored.map(|()| http::empty(StatusCode::NO_CONTENT))
}

async fn put_at(
    shared: &Shared,
    destination: Result<(Vec<u8>, u32), Refused>,
    source: &mut Source,
) -> Result<(), Refused> {
    let (path, mode) = destination?;
    if let Source::Form(form) = source
        && form.find("file").await?.is_none()
    {
        return Err(invalid("the form has no part named file".to_owned()));
    }
    match store(&shared.root, &path, mode, source).await {
        Err(StoreError::Failure(failure)) => Err(not_written(failure)),
        Err(StoreError::Source(error)) => Err(error.into()),
        Ok(()) => Ok(()),
    }
}

/// Path and permission bits of the file to write.
fn destination(rest: &str, query: Option<&str>) -> Result<(Vec<u8>, u32), Refused> {
    let path = beneath_root(&decode(rest))?;
    Ok((path, mode(parameter(query, "mode"))?))
}

/// When writing, a file in place of a parent directory is 400, not 404.
fn not_written(failure: Failure) -> Refused {
    if failure.code == ErrorCode::NotDirectory {
        invalid(failure.message)
    } else {
        failure.into()
    }
}

async fn delete(
    shared: &Shared,
    rest: &str,
    query: Option<&str>,
) -> Result<Response<Body>, Refused> {
    let path = beneath_root(&decode(rest))?;
    let recursive = match parameter(query, "recursive").as_deref() {
        None | Some("" | "0" | "f" | "F" | "false" | "FALSE" | "False") => false,
        Some("1" | "t" | "T" | "true" | "TRUE" | "True") => true,
        Some(other) => return Err(invalid(format!("recursive={other}: use true or false"))),
    };
    if path.is_empty() {
        clear_root(shared, recursive).await?;
    } else {
        if !recursive && !is_empty(shared, &path).await? {
            return Err(not_empty());
        }
        shared.root.remove(&path, recursive).await?;
    }
    Ok(http::empty(StatusCode::NO_CONTENT))
}

/// Removes all entries of the root, but not the root itself: it may be a mounted volume.
async fn clear_root(shared: &Shared, recursive: bool) -> Result<(), Refused> {
    if !recursive {
        return Err(not_empty());
    }
    loop {
        let (entries, whole) = shared.root.list(b"", http::ENTRIES_MAX).await?;
        for (_, info) in entries {
            let name = info.path.rsplit(|byte| *byte == b'/').next();
            match shared.root.remove(name.unwrap_or_default(), true).await {
                Err(failure) if failure.code != ErrorCode::NotFound => return Err(failure.into()),
                Ok(()) | Err(_) => {}
            }
        }
        if whole {
            return Ok(());
        }
    }
}

/// Whether the path can be removed without `recursive`: anything but a directory with entries. A symbolic link is not
/// a directory.
async fn is_empty(shared: &Shared, path: &[u8]) -> Result<bool, Refused> {
    let info = shared.root.lstat(path).await?;
    if info.r#type() != FileType::Directory {
        return Ok(true);
    }
    let (entries, _) = shared.root.list(path, 1).await?;
    Ok(entries.is_empty())
}

/// Permission bits from the query; the default is 0644.
fn mode(parameter: Option<String>) -> Result<u32, Refused> {
    let Some(text) = parameter.filter(|text| !text.is_empty()) else {
        return Ok(0o644);
    };
    let digits = text.len() == 4 && text.starts_with('0');
    let mode = u32::from_str_radix(&text, 8).ok().filter(|_| digits);
    match mode {
        // For the guest, 0 means to keep the mode.
        Some(0) => Err(invalid(
            "mode=0000: the file could not be read by anyone".to_owned(),
        )),
        Some(mode) => Ok(mode),
        None => Err(invalid(format!(
            "mode={text}: use four octal digits, such as 0644"
        ))),
    }
}

/// Sets `Last-Modified` and `Accept-Ranges`.
fn describe(response: &mut Response<Body>, info: &FileInfo) {
    insert(response, LAST_MODIFIED, &http_date(info.mtime_unix_ns));
    insert(response, ACCEPT_RANGES, "bytes");
}

fn insert(response: &mut Response<Body>, name: hyper::header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn not_allowed(allowed: &'static str) -> Response<Body> {
    let message = format!("use {allowed}");
    let refused = Refused(StatusCode::METHOD_NOT_ALLOWED, "INVALID_ARGUMENT", message);
    let mut response = refused.response();
    insert(&mut response, ALLOW, allowed);
    response
}

fn nothing_here() -> Refused {
    let message = "there is /v1/files/{path}, /v1/health and /v1/metadata".to_owned();
    Refused(StatusCode::NOT_FOUND, "NOT_FOUND", message)
}

fn not_empty() -> Refused {
    let message = "the directory is not empty; recursive=true removes it with what is in it";
    Refused(StatusCode::CONFLICT, "CONFLICT", message.to_owned())
}

fn invalid(message: String) -> Refused {
    Refused(StatusCode::BAD_REQUEST, "INVALID_ARGUMENT", message)
}

// === impl Refused ===

impl Refused {
    fn response(self) -> Response<Body> {
        let Self(status, code, message) = self;
        json(status, &json!({"code": code, "message": message}))
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        let (status, code) = match failure.code {
            ErrorCode::Invalid | ErrorCode::IsDirectory => {
                (StatusCode::BAD_REQUEST, "INVALID_ARGUMENT")
            }
            ErrorCode::Outside | ErrorCode::Permission => {
                (StatusCode::FORBIDDEN, "PERMISSION_DENIED")
            }
            ErrorCode::NotFound | ErrorCode::NotDirectory => (StatusCode::NOT_FOUND, "NOT_FOUND"),
            ErrorCode::Exists | ErrorCode::Precondition => (StatusCode::CONFLICT, "CONFLICT"),
            // Not 500: clients would retry.
            ErrorCode::Exhausted => (StatusCode::INSUFFICIENT_STORAGE, "INTERNAL"),
            ErrorCode::Unspecified => (StatusCode::SERVICE_UNAVAILABLE, "UNAVAILABLE"),
            ErrorCode::NoProgram | ErrorCode::Io => (StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL"),
        };
        Self(status, code, failure.message)
    }
}

impl From<UploadError> for Refused {
    fn from(error: UploadError) -> Self {
        let status = match error {
            UploadError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            UploadError::Idle(_) => StatusCode::REQUEST_TIMEOUT,
            UploadError::Broken => StatusCode::BAD_REQUEST,
        };
        Self(status, "INVALID_ARGUMENT", error.to_string())
    }
}

impl From<MultipartError> for Refused {
    fn from(error: MultipartError) -> Self {
        match error {
            MultipartError::Upload(error) => error.into(),
            MultipartError::Malformed(_) => invalid(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_four_octal_digits() {
        let read = |text: &str| mode(Some(text.to_owned())).map_err(|refused| refused.0);
        assert_eq!(read("0644"), Ok(0o644));
        assert_eq!(read(""), Ok(0o644));
        for bad in ["644", "1777", "0844", "00644", "+644", "0000"] {
            assert_eq!(read(bad), Err(StatusCode::BAD_REQUEST), "{bad}");
        }
    }
}
