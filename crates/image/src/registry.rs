//! A client of the OCI distribution protocol: one image's manifest, configuration and layers.
//!
//! A client of our own, because the server that uses it must not be led astray: every connection,
//! also one that a redirect or a token service leads to, is made to an address that was looked up and
//! checked first, and nothing else resolves names or follows links.

mod auth;
mod http;
mod policy;

pub use http::Resolve;
pub use policy::RegistryPolicy;

use crate::error::ImageError;
use crate::hash::digest_of;
use crate::manifest::{ACCEPTED, Blob, Document, MANIFEST_BYTES_MAX, Manifest};
use crate::reference::Reference;
use auth::{Authorization, Challenge};
use bytes::Bytes;
use http::{Answer, Http, Url};
use hyper::StatusCode;
use k8e_model::Code;
use std::fmt;
use std::sync::Arc;

/// From a registry to where it keeps blobs, and on.
const REDIRECTS_MAX: usize = 5;

/// Of what a token service answers.
const TOKEN_BYTES_MAX: usize = 64 * 1024;

/// Of a registry's reason for an error.
const REASON_BYTES_MAX: usize = 4 * 1024;
const REASON_CHARS_MAX: usize = 200;

/// A name and a password, or token, for one registry. Not shown by `Debug`, and never stored.
#[derive(Clone)]
pub struct Credentials {
    /// The user.
    pub username: String,
    /// The password or token.
    pub password: String,
}

/// One image on a registry.
pub struct Registry {
    http: Http,
    reference: Reference,
    /// The registry, or the mirror that is asked instead.
    base: Url,
    credentials: Option<Credentials>,
    authorization: Option<Authorization>,
}

/// The bytes of a blob as they come. Whoever reads them checks their digest.
pub struct BlobStream {
    answer: Answer,
    left: u64,
}

// === impl Credentials ===

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(…)")
    }
}

// === impl Registry ===

impl Registry {
    /// Finds an image: its manifest for this machine's platform, and the manifest's bytes. Mirrors of
    /// Docker Hub are asked first, without the credentials, which are for the registry.
    ///
    /// # Errors
    ///
    /// When the registry refuses, lies, takes too long or may not be asked.
    pub async fn find(
        policy: &RegistryPolicy,
        resolve: Arc<dyn Resolve>,
        reference: &Reference,
        credentials: Option<Credentials>,
    ) -> Result<(Self, Manifest), ImageError> {
        let mirrors = match reference.is_docker_hub() {
            true => policy.mirrors(),
            false => &[],
        };
        let mut unreachable = None;
        for authority in mirrors {
            let mut mirror = Self::new(policy, &resolve, reference, authority, None)?;
            match mirror.manifest().await {
                Ok(manifest) => return Ok((mirror, manifest)),
                Err(error) => unreachable = Some(error),
            }
        }
        let mut registry = Self::new(policy, &resolve, reference, reference.host(), credentials)?;
        match (registry.manifest().await, unreachable) {
            (Ok(manifest), _) => Ok((registry, manifest)),
            (Err(error), None) => Err(error),
            (Err(error), Some(mirror)) => Err(ImageError::Registry(
                format!("{error}; and no mirror has it: {mirror}"),
                error.code(),
            )),
        }
    }

    fn new(
        policy: &RegistryPolicy,
        resolve: &Arc<dyn Resolve>,
        reference: &Reference,
        authority: &str,
        credentials: Option<Credentials>,
    ) -> Result<Self, ImageError> {
        Ok(Self {
            base: policy.base(authority)?,
            http: Http::new(policy.clone(), Arc::clone(resolve)),
            reference: reference.clone(),
            credentials,
            authorization: None,
        })
    }

    /// The bytes of the image's configuration, checked.
    ///
    /// # Errors
    ///
    /// As [`Registry::find`].
    pub async fn config(&mut self, manifest: &Manifest) -> Result<Vec<u8>, ImageError> {
        let what = "the image's configuration";
        let blob = &manifest.config;
        let answer = self
            .get(&format!("blobs/{}", blob.digest), "*/*", what)
            .await?;
        let max = usize::try_from(blob.bytes).unwrap_or(usize::MAX);
        let bytes = answer.all(max, what).await?;
        self.check(what, blob.digest.as_str(), &bytes)?;
        Ok(bytes)
    }

    /// Begins to fetch a blob.
    ///
    /// # Errors
    ///
    /// As [`Registry::find`].
    pub async fn blob(&mut self, blob: &Blob) -> Result<BlobStream, ImageError> {
        let path = format!("blobs/{}", blob.digest);
        let answer = self.get(&path, "*/*", "a layer of the image").await?;
        Ok(BlobStream {
            answer,
            left: blob.bytes,
        })
    }

    async fn manifest(&mut self) -> Result<Manifest, ImageError> {
        let mut version = self.reference.version().to_owned();
        let pinned = self.reference.digest().map(ToString::to_string);
        let mut wanted = pinned;
        let what = "the image's manifest";
        // An index, and one of its images.
        for _ in 0..2 {
            let answer = self
                .get(&format!("manifests/{version}"), ACCEPTED, what)
                .await?;
            let bytes = answer.all(MANIFEST_BYTES_MAX, what).await?;
            if let Some(wanted) = &wanted {
                self.check(what, wanted, &bytes)?;
            }
            match Document::parse(&bytes)? {
                Document::Manifest(manifest) => return Ok(manifest),
                Document::Index(digest) => {
                    version = digest.to_string();
                    wanted = Some(version.clone());
                }
            }
        }
        Err(ImageError::invalid(
            "the image's index leads to another index",
        ))
    }

    fn check(&self, what: &'static str, wanted: &str, bytes: &[u8]) -> Result<(), ImageError> {
        let found = digest_of(bytes);
        match found.as_str() == wanted {
            true => Ok(()),
            false => Err(ImageError::Digest {
                what,
                wanted: wanted.to_owned(),
                found: found.to_string(),
            }),
        }
    }

    /// Asks for a part of the repository, with a token when the registry wants one.
    async fn get(&mut self, path: &str, accept: &str, what: &str) -> Result<Answer, ImageError> {
        let url = self
            .base
            .join(&format!("/v2/{}/{path}", self.reference.repository()))?;
        let (answer, own) = self.follow(&url, accept).await?;
        // Only the registry itself may say who gets its credentials: not a host that it redirects to.
        if answer.status() != StatusCode::UNAUTHORIZED || !own {
            return self.accepted(answer, what).await;
        }
        let challenge = Challenge::parse(answer.challenges());
        self.authorization = Some(self.authorize(challenge).await?);
        let (answer, _) = self.follow(&url, accept).await?;
        self.accepted(answer, what).await
    }

    /// The answer at the end of redirects, and whether the registry itself gave it. The authorization stays
    /// with the host that it is for.
    async fn follow(&self, url: &Url, accept: &str) -> Result<(Answer, bool), ImageError> {
        let mut url = url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let own = url.same_host(&self.base);
            let authorization = self.authorization.as_ref().filter(|_| own);
            let header = authorization.map(Authorization::header);
            let answer = self.http.get(&url, accept, header.as_ref()).await?;
            match answer.location(&url)? {
                Some(next) => url = next,
                None => return Ok((answer, own)),
            }
        }
        Err(self.failed("it redirects without end", Code::Unavailable))
    }

    async fn authorize(&self, challenge: Option<Challenge>) -> Result<Authorization, ImageError> {
        let denied = || self.failed("it wants a login", Code::Denied);
        match challenge.ok_or_else(denied)? {
            Challenge::Basic => {
                let credentials = self.credentials.as_ref().ok_or_else(denied)?;
                Ok(Authorization::basic(credentials))
            }
            Challenge::Bearer {
                realm,
                service,
                scope,
            } => {
                let scope = scope
                    .unwrap_or_else(|| format!("repository:{}:pull", self.reference.repository()));
                let url = Url::parse(&realm)?
                    .with_query(&[("service", service.as_deref()), ("scope", Some(&scope))])?;
                let basic = self.credentials.as_ref().map(Authorization::basic);
                let header = basic.as_ref().map(Authorization::header);
                let answer = self
                    .http
                    .get(&url, "application/json", header.as_ref())
                    .await?;
                let answer = self.accepted(answer, "a token").await?;
                let bytes = answer.all(TOKEN_BYTES_MAX, "a registry's token").await?;
                Authorization::token(&bytes)
            }
        }
    }

    async fn accepted(&self, answer: Answer, what: &str) -> Result<Answer, ImageError> {
        let status = answer.status();
        let code = match status {
            status if status.is_success() => return Ok(answer),
            StatusCode::NOT_FOUND => Code::NotFound,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Code::Denied,
            StatusCode::TOO_MANY_REQUESTS => Code::Exhausted,
            _ => Code::Unavailable,
        };
        let said = answer.front(REASON_BYTES_MAX).await;
        let said = reason(&said)
            .map(|said| format!(": {said}"))
            .unwrap_or_default();
        Err(self.failed(
            &format!("it answered {status} to a request for {what}{said}"),
            code,
        ))
    }

    fn failed(&self, why: &str, code: Code) -> ImageError {
        let (reference, host) = (&self.reference, self.base.host());
        ImageError::Registry(format!("cannot fetch {reference} from {host}: {why}"), code)
    }
}

// === impl BlobStream ===

impl BlobStream {
    /// The next bytes; none at the end. More than the blob has is an error, and so is fewer.
    ///
    /// # Errors
    ///
    /// When the connection breaks or stalls.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ImageError> {
        match self.answer.next().await? {
            Some(bytes) => {
                self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(|| {
                    ImageError::invalid("the registry sent more of a layer than its manifest says")
                })?;
                Ok(Some(bytes))
            }
            None if self.left > 0 => Err(ImageError::invalid(
                "the registry sent less of a layer than its manifest says",
            )),
            None => Ok(None),
        }
    }
}

/// What a registry says about an error, as one line of text.
fn reason(bytes: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let error = value.get("errors")?.get(0)?;
    let said = error.get("message")?.as_str()?;
    let clean = said
        .chars()
        .filter(|c| !c.is_control())
        .take(REASON_CHARS_MAX);
    Some(clean.collect())
}

#[cfg(test)]
mod tests;
