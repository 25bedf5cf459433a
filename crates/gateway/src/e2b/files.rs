//! `/files`: downloads and uploads, authenticated by the access token or by a signature in the URL.

use super::body::{self, Answer, BoxError, Upload};
use super::envd::Authenticated;
use super::error::Failure;
use super::query::Query;
use super::signature::{self, Operation, Signed};
use super::user::User;
use super::{Api, Client};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, HeaderMap, HeaderValue, RANGE,
};
use hyper::{Method, Request, StatusCode};
use k8e_engine::{Error, FileKind, FileRange, FileWriter, WriteOptions};
use k8e_model::{ClientKind, Code, GuestPath, SessionId};
use k8e_net::multipart::{Chunks, Multipart, MultipartError, boundary};
use serde_json::{Value, json};
use std::collections::HashSet;

const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// Serves a request with a signature and without a sandbox: the token that it was made with says which it is.
pub(super) async fn serve_signed(
    api: &Api,
    request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let query = Query::of(request.uri());
    let signed = Signed::of(&query, operation(request.method())?)?;
    let found = api
        .sessions
        .find_by_token(&ClientKind::e2b(), |token| signed.is_by(token));
    let (id, who) = found.ok_or_else(signature::invalid)?;
    signed.check_expiry()?;
    let call = Authenticated::admitted(api, id, who, request.method(), "/files", client)?;
    serve(&call, request).await
}

/// The same for a sandbox that is named.
pub(super) async fn serve_signed_for(
    api: &Api,
    id: &SessionId,
    request: Request<Incoming>,
    client: &Client,
) -> Result<Answer, Failure> {
    let query = Query::of(request.uri());
    let signed = Signed::of(&query, operation(request.method())?)?;
    let is_right = |token: &str| signed.is_by(token);
    let who = api
        .sessions
        .verify_derived(id, &ClientKind::e2b(), is_right);
    let who = who.ok_or_else(signature::invalid)?;
    signed.check_expiry()?;
    let call = Authenticated::admitted(api, id.clone(), who, request.method(), "/files", client)?;
    serve(&call, request).await
}

fn operation(method: &Method) -> Result<Operation, Failure> {
    match method.as_str() {
        "GET" => Ok(Operation::Read),
        "POST" => Ok(Operation::Write),
        _ => Err(Failure::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "use GET or POST",
        )),
    }
}

/// Serves an authenticated request.
pub(super) async fn serve(
    call: &Authenticated<'_>,
    request: Request<Incoming>,
) -> Result<Answer, Failure> {
    let query = Query::of(request.uri());
    let user = User::named(query.get("username").unwrap_or_default())?;
    let path = query.get("path").unwrap_or_default();
    match operation(request.method())? {
        Operation::Read => download(call, user, path, request.headers()).await,
        Operation::Write => upload(call, user, path, request).await,
    }
}

async fn download(
    call: &Authenticated<'_>,
    user: User,
    path: &str,
    headers: &HeaderMap,
) -> Result<Answer, Failure> {
    if path.is_empty() {
        return Err(Failure::invalid("path is missing"));
    }
    let guest_path = user.path(path)?;
    let missing = |error: &Error| {
        let code = error.code();
        if code == Code::NotFound && !super::error::is_gone(error) {
            Failure::not_found(format!("path '{}' does not exist", user.absolute(path)))
        } else if matches!(error, Error::Guest { .. }) && code == Code::Precondition {
            Failure::invalid(format!("path '{path}' is a directory"))
        } else {
            call.failed(error)
        }
    };
    let sessions = &call.api.sessions;
    let range = match headers.get(RANGE).and_then(|value| value.to_str().ok()) {
        None => None,
        Some(text) => {
            let info = sessions.stat_target(&call.who, &call.id, &guest_path).await;
            let size = info.map_err(|error| missing(&error))?.size;
            single_range(text, size)?
        }
    };
    let wanted = range.map_or(FileRange::default(), |(from, to)| FileRange {
        offset: from,
        length: to - from + 1,
    });
    let reader = sessions
        .read_file(&call.who, &call.id, &guest_path, wanted)
        .await;
    let reader = reader.map_err(|error| missing(&error))?;
    if reader.info.kind == FileKind::Directory {
        return Err(Failure::invalid(format!("path '{path}' is a directory")));
    }
    let size = reader.info.size;
    let mut answer = body::streamed(
        OCTETS,
        futures::stream::unfold(Some(reader), |reader| async move {
            let mut reader = reader?;
            match reader.next().await {
                Ok(Some(data)) => Some((Ok(data), Some(reader))),
                Ok(None) => None,
                Err(error) => Some((Err(BoxError::from(error.to_string())), None)),
            }
        }),
    );
    let headers = answer.headers_mut();
    headers.insert(CONTENT_DISPOSITION, HeaderValue::from_static("inline"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some((from, to)) = range {
        headers.insert(CONTENT_LENGTH, (to - from + 1).into());
        if let Ok(value) = HeaderValue::from_str(&format!("bytes {from}-{to}/{size}")) {
            headers.insert(CONTENT_RANGE, value);
        }
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(answer)
}

/// First and last byte of `Range: bytes=…`. None where the header is to be ignored: several ranges, or another unit.
fn single_range(text: &str, size: u64) -> Result<Option<(u64, u64)>, Failure> {
    let Some(range) = text
        .trim()
        .strip_prefix("bytes=")
        .filter(|range| !range.contains(','))
    else {
        return Ok(None);
    };
    let Some((from, to)) = range.split_once('-') else {
        return Ok(None);
    };
    let wrong = || {
        Failure::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            format!("the file has {size} bytes"),
        )
    };
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let (from, to) = match (number(from), number(to)) {
        (None, Some(last)) if from.trim().is_empty() => {
            (size.saturating_sub(last), size.saturating_sub(1))
        }
        (Some(from), None) if to.trim().is_empty() => (from, size.saturating_sub(1)),
        (Some(from), Some(to)) if from <= to => (from, to.min(size.saturating_sub(1))),
        _ => return Ok(None),
    };
    match from < size && from <= to {
        true => Ok(Some((from, to))),
        false => Err(wrong()),
    }
}

async fn upload(
    call: &Authenticated<'_>,
    user: User,
    path: &str,
    request: Request<Incoming>,
) -> Result<Answer, Failure> {
    let headers = request.headers();
    let text = |name| {
        headers
            .get(name)
            .and_then(|value: &HeaderValue| value.to_str().ok())
    };
    if headers
        .keys()
        .any(|name| name.as_str().starts_with("x-metadata-"))
    {
        return Err(Failure::unsupported("metadata of files"));
    }
    if text(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return Err(Failure::unsupported("compressed uploads"));
    }
    let kind = text(CONTENT_TYPE).unwrap_or_default().to_owned();
    let form = boundary(&kind);
    let mut upload = Upload(request.into_body());
    let written = match form {
        Some(boundary) => {
            let mut form = Multipart::new(upload, &boundary);
            store_form(call, user, path, &mut form).await?
        }
        None if kind.split(';').next().unwrap_or_default().trim() == "application/octet-stream" => {
            if path.is_empty() {
                return Err(Failure::invalid("path is missing"));
            }
            let place = user.path(path)?;
            let mut writer = open(call, user, &place).await?;
            while let Some(data) = upload.next().await? {
                write(call, &mut writer, data).await?;
            }
            finish(call, writer).await?;
            vec![described(&place)]
        }
        None => {
            let message = "use multipart/form-data, or application/octet-stream";
            return Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
    };
    body::json(StatusCode::OK, &written)
}

/// Writes each part named `file`: to the path of the query, or to the one that is its file name.
async fn store_form(
    call: &Authenticated<'_>,
    user: User,
    path: &str,
    form: &mut Multipart<Upload>,
) -> Result<Vec<Value>, Failure> {
    let mut seen = HashSet::new();
    let mut written = Vec::new();
    while let Some(part) = form.next_part().await.map_err(malformed)? {
        if part.name != "file" {
            continue;
        }
        let named = part.filename.unwrap_or_default();
        let to = if path.is_empty() { &named } else { path };
        if to.is_empty() {
            return Err(Failure::invalid(
                "a part has no file name, and the request no path",
            ));
        }
        let place = user.path(to)?;
        if !seen.insert(place.as_bytes().to_vec()) {
            return Err(Failure::invalid(format!(
                "two parts are for the same path: {to}"
            )));
        }
        let mut writer = open(call, user, &place).await?;
        while let Some(data) = form.data().await.map_err(malformed)? {
            write(call, &mut writer, data).await?;
        }
        finish(call, writer).await?;
        written.push(described(&place));
    }
    match written.is_empty() {
        true => Err(Failure::invalid("the form has no part named file")),
        false => Ok(written),
    }
}

fn malformed(error: MultipartError<Failure>) -> Failure {
    match error {
        MultipartError::Upload(failure) => failure,
        error @ MultipartError::Malformed(_) => Failure::invalid(error.to_string()),
    }
}

async fn open(
    call: &Authenticated<'_>,
    user: User,
    path: &GuestPath,
) -> Result<FileWriter, Failure> {
    let options = WriteOptions {
        append: false,
        mode: 0,
        owner: Some(user.owner()),
    };
    let writer = call
        .api
        .sessions
        .write_file(&call.who, &call.id, path, options)
        .await;
    writer.map_err(|error| refused(call, &error))
}

async fn write(
    call: &Authenticated<'_>,
    writer: &mut FileWriter,
    data: bytes::Bytes,
) -> Result<(), Failure> {
    writer
        .write(data)
        .await
        .map_err(|error| refused(call, &error))
}

async fn finish(call: &Authenticated<'_>, writer: FileWriter) -> Result<(), Failure> {
    let written = writer.finish().await;
    written.map(drop).map_err(|error| refused(call, &error))
}

fn refused(call: &Authenticated<'_>, error: &Error) -> Failure {
    let of_guest = |code| matches!(error, Error::Guest { .. }) && error.code() == code;
    if of_guest(Code::Exhausted) {
        // The sandbox's disk is full.
        Failure::new(StatusCode::INSUFFICIENT_STORAGE, error.to_string())
    } else if of_guest(Code::Precondition) {
        Failure::invalid(error.to_string())
    } else {
        call.failed(error)
    }
}

fn described(path: &GuestPath) -> Value {
    let text = format!("/{}", String::from_utf8_lossy(path.as_bytes()));
    let name = text.rsplit('/').next().unwrap_or_default();
    json!({ "path": text, "name": name, "type": "file" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_is_served() {
        let range =
            |text: &str, size| single_range(text, size).map_err(|failure| failure.status.as_u16());
        assert_eq!(range("bytes=0-4", 10), Ok(Some((0, 4))));
        assert_eq!(range("bytes=5-", 10), Ok(Some((5, 9))));
        assert_eq!(range("bytes=-3", 10), Ok(Some((7, 9))));
        assert_eq!(range("bytes=8-100", 10), Ok(Some((8, 9))));
        assert_eq!(range("bytes=10-", 10), Err(416));
        assert_eq!(range("bytes=0-", 0), Err(416));
        for ignored in [
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes=5-2",
            "bytes=x",
            "bytes=-",
        ] {
            assert_eq!(range(ignored, 10), Ok(None), "{ignored}");
        }
    }
}
