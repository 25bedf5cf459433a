//! Authorization: whether a client may reach a sandbox. Before the lookup, so that a refusal does not tell whether the
//! sandbox exists.

mod cache;
mod review;
pub(super) mod token;

use super::options::{AuthzMode, Options};
use super::refusal::Refusal;
use super::target::{POD_IP, Target, UID};
use super::{Error, read_file};
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HeaderMap};
use review::Reviews;
use std::time::SystemTime;
use token::Secret;

/// Largest bearer token: those of service accounts have about 1,200 bytes, those of OIDC providers a few thousand.
const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// The configured authorizer (`--authz-mode`).
pub(super) enum Authorizer {
    /// Every request is allowed.
    AllowAll,
    /// The API server decides, by TokenReview and SubjectAccessReview.
    Reviews(Box<Reviews>),
    /// A scoped token, signed with this secret, names the sandbox.
    Scoped(Secret),
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// There is no valid token.
    Unauthenticated,
    /// The token is valid, but not for this sandbox.
    Forbidden,
    /// A scoped token was sent together with a header that overrides the target.
    Redirected,
    /// The API server did not answer a review.
    Unavailable,
}

// === impl Authorizer ===

impl Authorizer {
    pub(super) fn new(options: &Options, client: &kube::Client) -> Result<Self, Error> {
        match options.authz_mode {
            AuthzMode::AllowAll => {
                tracing::warn!(
                    "--authz-mode allow-all: no authorization; every client reaches every sandbox"
                );
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

    /// Checks the token in the headers of a request against its target.
    pub(super) async fn authorize(
        &self,
        headers: &HeaderMap,
        target: &Target,
    ) -> Result<(), Denied> {
        match self {
            Self::AllowAll => Ok(()),
            Self::Reviews(reviews) => {
                let token = bearer(headers).ok_or(Denied::Unauthenticated)?;
                reviews.authorize(token, target).await
            }
            Self::Scoped(secret) => {
                let token = bearer(headers).ok_or(Denied::Unauthenticated)?;
                secret.authorize(token, target, SystemTime::now())?;
                // Scoped tokens, version 1, do not cover these headers, so they must not be used.
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
            Self::Unauthenticated => (
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
                "The API server did not answer whether this token is valid; try again.",
            ),
        };
        Refusal::new(status, detail)
    }
}

/// The bearer token, if there is exactly one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    let fits = !token.is_empty() && token.len() <= TOKEN_BYTES_MAX;
    (values.next().is_none() && scheme.eq_ignore_ascii_case("bearer") && fits).then_some(token)
}
