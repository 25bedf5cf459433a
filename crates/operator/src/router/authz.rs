//! Who may reach a sandbox. Asked before it is looked for, so that nobody learns what there is.

mod cache;
mod review;
pub(super) mod token;

use super::answer::Refusal;
use super::options::{AuthzMode, Options};
use super::target::{POD_IP, Target, UID};
use super::{Error, read_file};
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HeaderMap};
use review::Reviews;
use std::time::SystemTime;
use token::Secret;

/// Of a bearer token: service account tokens have some 1,200 bytes, those of companies' logins a few thousand.
const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// Who decides.
pub(super) enum Authorizer {
    /// Nobody: everybody may.
    AllowAll,
    /// The cluster.
    Reviews(Box<Reviews>),
    /// Whoever made the token.
    Scoped(Secret),
}

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// We do not know who is asking.
    Unknown,
    /// We do, and he may not.
    Forbidden,
    /// A token for one sandbox, with a header that means another.
    Redirected,
    /// The cluster did not say.
    Unavailable,
}

// === impl Authorizer ===

impl Authorizer {
    pub(super) fn new(options: &Options, client: &kube::Client) -> Result<Self, Error> {
        match options.authz_mode {
            AuthzMode::AllowAll => {
                tracing::warn!("--authz-mode allow-all: whoever can connect reaches every sandbox");
                Ok(Self::AllowAll)
            }
            AuthzMode::Tokenreview => Ok(Self::Reviews(Box::new(Reviews::new(
                options,
                client.clone(),
            )))),
            AuthzMode::ScopedToken => {
                let path = options
                    .authz_scoped_token_secret_file
                    .as_deref()
                    .unwrap_or("".as_ref());
                let secret = read_file("--authz-scoped-token-secret-file", path)?;
                Ok(Self::Scoped(Secret::new(&secret)?))
            }
        }
    }

    /// Whether who sent these headers may reach it.
    pub(super) async fn authorize(
        &self,
        headers: &HeaderMap,
        target: &Target,
    ) -> Result<(), Denied> {
        match self {
            Self::AllowAll => Ok(()),
            Self::Reviews(reviews) => {
                let token = bearer(headers).ok_or(Denied::Unknown)?;
                reviews.authorize(token, target).await
            }
            Self::Scoped(secret) => {
                let token = bearer(headers).ok_or(Denied::Unknown)?;
                secret.authorize(token, target, SystemTime::now())?;
                // The format is older than the check of these headers, and promises that they are not followed.
                let redirected = headers.contains_key(POD_IP) || headers.contains_key(UID);
                if redirected {
                    Err(Denied::Redirected)
                } else {
                    Ok(())
                }
            }
        }
    }
}

// === impl Denied ===

impl Denied {
    pub(super) fn refusal(self) -> Refusal {
        let (status, detail) = match self {
            Self::Unknown => (
                StatusCode::UNAUTHORIZED,
                "A valid token is required: send Authorization: Bearer <token>.",
            ),
            Self::Forbidden => (
                StatusCode::FORBIDDEN,
                "This token may not reach this sandbox.",
            ),
            Self::Redirected => (
                StatusCode::FORBIDDEN,
                "X-Sandbox-Pod-IP and X-Sandbox-UID cannot be used with a scoped token.",
            ),
            Self::Unavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The cluster did not say whether this token is valid; try again.",
            ),
        };
        Refusal::new(status, detail)
    }
}

/// The token, if there is exactly one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    let fits = !token.is_empty() && token.len() <= TOKEN_BYTES_MAX;
    (values.next().is_none() && scheme.eq_ignore_ascii_case("bearer") && fits).then_some(token)
}
