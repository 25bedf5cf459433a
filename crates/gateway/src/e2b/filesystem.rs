//! `filesystem.Filesystem`: stat, listings, directories, moves, removals and watches, anywhere in the sandbox.

pub(super) mod watch;

use super::body::{Answer, Upload};
use super::connect::{Error, Rpc, unary};
use super::entry::entry;
use super::envd::Authenticated;
use super::error::Failure;
use super::user::User;
use hyper::Request;
use hyper::body::Incoming;
use k8e_engine::{FileInfo, FileKind, ListOptions};
use k8e_model::{Code, GuestPath};
use serde::Deserialize;
use serde_json::{Value, json};

/// Symbolic links of one listing whose target is looked up, each with a call; further ones are described as links.
const LINKS_FOLLOWED_MAX: usize = 256;

#[derive(Debug, Deserialize)]
struct PathRequest {
    #[serde(default)]
    path: String,
}

#[derive(Debug, Deserialize)]
struct ListRequest {
    #[serde(default)]
    path: String,
    #[serde(default)]
    depth: u32,
}

#[derive(Debug, Deserialize)]
struct MoveRequest {
    #[serde(default)]
    source: String,
    #[serde(default)]
    destination: String,
}

/// Serves one call.
pub(super) async fn serve(
    call: &Authenticated<'_>,
    rpc: Rpc,
    method: &str,
    request: Request<Incoming>,
) -> Result<Answer, Failure> {
    let fs = User::of_headers(request.headers())
        .map(|user| Fs { call, user })
        .map_err(Error::from);
    let upload = Upload(request.into_body());
    if method == "WatchDir" {
        return Ok(watch::stream(fs, rpc, upload).await);
    }
    let fs = match fs {
        Ok(fs) => fs,
        Err(error) => return unary(Err::<Value, _>(error)),
    };
    match method {
        "Stat" => unary(fs.stat(rpc, upload).await),
        "ListDir" => unary(fs.list(rpc, upload).await),
        "MakeDir" => unary(fs.make_dir(rpc, upload).await),
        "Move" => unary(fs.rename(rpc, upload).await),
        "Remove" => unary(fs.remove(rpc, upload).await),
        "CreateWatcher" => unary(watch::create(&fs, rpc, upload).await),
        "GetWatcherEvents" => unary(watch::events(&fs, rpc, upload).await),
        "RemoveWatcher" => unary(watch::remove(&fs, rpc, upload).await),
        _ => Err(Failure::not_found(format!(
            "no such call: filesystem.Filesystem/{method}"
        ))),
    }
}

struct Fs<'a> {
    call: &'a Authenticated<'a>,
    user: User,
}

// === impl Fs ===

impl Fs<'_> {
    async fn stat(&self, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
        let request: PathRequest = rpc.message(upload).await?;
        Ok(json!({ "entry": self.described(&self.path(&request.path)?).await? }))
    }

    async fn list(&self, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
        let request: ListRequest = rpc.message(upload).await?;
        let path = self.path(&request.path)?;
        let depth = request.depth.max(1);
        let options = ListOptions {
            recursive: depth > 1,
            since_unix_s: 0,
            depth,
        };
        let call = self.call;
        let listed = call
            .api
            .sessions
            .list_files(&call.who, &call.id, &path, options)
            .await;
        let mut lister = listed.map_err(|error| self.failed(&error))?;
        let mut files: Vec<FileInfo> = Vec::new();
        while let Some(some) = lister.next().await.map_err(|error| self.failed(&error))? {
            files.extend(some);
        }
        if lister.truncated() {
            let message = "the listing is too long: list a smaller directory, or with less depth";
            return Err(Error::new("resource_exhausted", message));
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let mut links_left = LINKS_FOLLOWED_MAX;
        let mut entries = Vec::with_capacity(files.len());
        for file in &files {
            let follow = file.kind == FileKind::Symlink && links_left > 0;
            links_left -= usize::from(follow);
            let target = match follow {
                true => self.target(file).await,
                false => None,
            };
            entries.push(entry(file, target.as_ref()));
        }
        Ok(json!({ "entries": entries }))
    }

    async fn make_dir(&self, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
        let request: PathRequest = rpc.message(upload).await?;
        let path = self.path(&request.path)?;
        let call = self.call;
        match call
            .api
            .sessions
            .stat_target(&call.who, &call.id, &path)
            .await
        {
            Ok(info) if info.kind == FileKind::Directory => {
                let message = format!("directory already exists: {}", request.path);
                return Err(Error::new("already_exists", message));
            }
            Ok(_) => {
                let message = format!(
                    "path already exists but is not a directory: {}",
                    request.path
                );
                return Err(Error::invalid(message));
            }
            Err(error) if error.code() == Code::NotFound && !super::error::is_gone(&error) => {}
            Err(error) => return Err(self.failed(&error)),
        }
        let made = call.api.sessions.make_dir_of(
            &call.who,
            &call.id,
            &path,
            (true, 0),
            Some(self.user.owner()),
        );
        made.await.map_err(|error| self.failed(&error))?;
        Ok(json!({ "entry": self.described(&path).await? }))
    }

    async fn rename(&self, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
        let request: MoveRequest = rpc.message(upload).await?;
        let (from, to) = (
            self.path(&request.source)?,
            self.path(&request.destination)?,
        );
        let call = self.call;
        let owner = self.user.owner();
        let moved = call
            .api
            .sessions
            .move_file_making_dirs(&call.who, &call.id, &from, &to, owner);
        moved.await.map_err(|error| self.failed(&error))?;
        Ok(json!({ "entry": self.described(&to).await? }))
    }

    async fn remove(&self, rpc: Rpc, upload: Upload) -> Result<Value, Error> {
        let request: PathRequest = rpc.message(upload).await?;
        let path = self.path(&request.path)?;
        let call = self.call;
        match call
            .api
            .sessions
            .remove_file(&call.who, &call.id, &path, true)
            .await
        {
            Ok(()) => Ok(json!({})),
            // As E2B has it: what is not there is removed.
            Err(error) if error.code() == Code::NotFound && !super::error::is_gone(&error) => {
                Ok(json!({}))
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn path(&self, path: &str) -> Result<GuestPath, Error> {
        if path.is_empty() {
            return Err(Error::invalid("path is empty"));
        }
        Ok(self.user.path(path)?)
    }

    /// Stat of a path, with what it leads to when it is a symbolic link.
    async fn described(&self, path: &GuestPath) -> Result<Value, Error> {
        let call = self.call;
        let info = call.api.sessions.stat(&call.who, &call.id, path).await;
        let info = info.map_err(|error| self.failed(&error))?;
        let target = match info.kind {
            FileKind::Symlink => self.target(&info).await,
            FileKind::File | FileKind::Directory | FileKind::Other => None,
        };
        Ok(entry(&info, target.as_ref()))
    }

    /// What a link leads to; none when that does not exist.
    async fn target(&self, link: &FileInfo) -> Option<FileInfo> {
        let call = self.call;
        let path = GuestPath::parse_absolute(&link.path).ok()?;
        call.api
            .sessions
            .stat_target(&call.who, &call.id, &path)
            .await
            .ok()
    }

    fn failed(&self, error: &k8e_engine::Error) -> Error {
        let refused = self.call.refused(error);
        match refused.code {
            // Not a directory, or one where a file is expected.
            "failed_precondition" => Error::invalid(refused.message),
            _ => refused,
        }
    }
}
