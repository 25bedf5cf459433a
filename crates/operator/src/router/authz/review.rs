//! Authorization by the API server: TokenReview (who is it), then SubjectAccessReview (may they), with a TTL cache.
//!
//! The permission is `create` on `sandboxes/proxy` of the sandbox, for every HTTP method: a client that reaches the
//! runtime in a sandbox can run code there, also with a GET. So it is one permission, like `pods/exec`, and read-only
//! roles do not include it.

use super::Denied;
use super::cache::Cache;
use crate::crd::names::GROUP;
use crate::router::options::Options;
use crate::router::target::Target;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use ring::digest::{Context, SHA256};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// Concurrent reviews: a flood of invalid tokens must not become a flood of requests to the API server.
const REVIEWS_MAX: usize = 64;
/// Timeout of a review, with the wait for a permit.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest TTL of a negative decision, so that a permission that was just granted takes effect soon.
const DENIED_TTL_MAX: Duration = Duration::from_secs(5);

/// SHA-256 of a token, or of a token and a sandbox. Tokens themselves are not kept in memory.
type Digest = [u8; 32];

pub(in crate::router) struct Reviews {
    tokens: Api<TokenReview>,
    access: Api<SubjectAccessReview>,
    audiences: Option<Vec<String>>,
    concurrency: Semaphore,
    ttl: Duration,
    /// User of a token; `None` if the token is not valid.
    users: Cache<Digest, Option<Arc<UserInfo>>>,
    /// Whether that token may reach that sandbox.
    decisions: Cache<Digest, bool>,
}

impl Reviews {
    pub(super) fn new(options: &Options, client: Client) -> Self {
        let audiences = &options.authz_tokenreview_audiences;
        let count_max = options.authz_tokenreview_cache_size;
        Self {
            tokens: Api::all(client.clone()),
            access: Api::all(client),
            audiences: (!audiences.is_empty()).then(|| audiences.clone()),
            concurrency: Semaphore::new(REVIEWS_MAX),
            ttl: options.authz_tokenreview_ttl,
            users: Cache::new(count_max),
            decisions: Cache::new(count_max),
        }
    }

    pub(super) async fn authorize(&self, token: &str, target: &Target) -> Result<(), Denied> {
        let of_token = digest(&[token]);
        let of_both = digest(&[token, &target.namespace, &target.name]);
        if let Some(allowed) = self.decisions.get(&of_both) {
            return if allowed {
                Ok(())
            } else {
                Err(Denied::Forbidden)
            };
        }
        let (user, until) = match self.users.get_until(&of_token) {
            Some(known) => known,
            None => {
                let user = self.review_token(token, of_token).await?;
                let ttl = self.ttl_of(user.is_some());
                (user, Instant::now() + ttl)
            }
        };
        let user = user.ok_or(Denied::Unauthenticated)?;
        let allowed = self.review_access(&user, target).await?;
        // Not beyond the TTL of the token's own entry: a revoked token is accepted for one TTL, not for two.
        let left = until.saturating_duration_since(Instant::now());
        let ttl = self.ttl_of(allowed).min(left);
        self.decisions.put(of_both, allowed, ttl);
        if allowed {
            Ok(())
        } else {
            Err(Denied::Forbidden)
        }
    }

    async fn review_token(
        &self,
        token: &str,
        key: Digest,
    ) -> Result<Option<Arc<UserInfo>>, Denied> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: self.audiences.clone(),
            },
            ..TokenReview::default()
        };
        let answer = self
            .with_limit(self.tokens.create(&PostParams::default(), &review))
            .await?;
        let status = answer.status.unwrap_or_default();
        let meant_for_us = match (&self.audiences, &status.audiences) {
            (None, _) => true,
            (Some(ours), Some(theirs)) => theirs.iter().any(|audience| ours.contains(audience)),
            // An authenticator without support for audiences returns none.
            (Some(_), None) => false,
        };
        let known = status.authenticated == Some(true) && meant_for_us;
        let user = status.user.filter(|_| known).map(Arc::new);
        self.users
            .put(key, user.clone(), self.ttl_of(user.is_some()));
        Ok(user)
    }

    async fn review_access(&self, user: &UserInfo, target: &Target) -> Result<bool, Denied> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username.clone(),
                groups: user.groups.clone(),
                uid: user.uid.clone(),
                extra: user.extra.clone(),
                resource_attributes: Some(ResourceAttributes {
                    group: Some(GROUP.to_owned()),
                    resource: Some("sandboxes".to_owned()),
                    subresource: Some("proxy".to_owned()),
                    verb: Some("create".to_owned()),
                    namespace: Some(target.namespace.clone()),
                    name: Some(target.name.clone()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let answer = self
            .with_limit(self.access.create(&PostParams::default(), &review))
            .await?;
        let status = answer.status.unwrap_or_default();
        Ok(status.allowed && status.denied != Some(true))
    }

    /// Runs a review within the concurrency limit and the timeout. Clients do not see the error, the log not the token.
    async fn with_limit<T>(
        &self,
        review: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Denied> {
        let reviewed = async {
            let _permit = self.concurrency.acquire().await;
            review.await
        };
        match timeout(REVIEW_TIMEOUT, reviewed).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                tracing::warn!(
                    "cannot review a token (is the router allowed to create tokenreviews and subjectaccessreviews?): {error}"
                );
                Err(Denied::Unavailable)
            }
            Err(_) => {
                tracing::warn!(
                    "the API server did not answer a token review within {REVIEW_TIMEOUT:?}"
                );
                Err(Denied::Unavailable)
            }
        }
    }

    fn ttl_of(&self, good: bool) -> Duration {
        if good {
            self.ttl
        } else {
            self.ttl.min(DENIED_TTL_MAX)
        }
    }
}

/// Hashes the parts, each with its length in front, so that different lists of parts have different digests.
fn digest(parts: &[&str]) -> Digest {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&part.len().to_be_bytes());
        context.update(part.as_bytes());
    }
    let mut digest = Digest::default();
    digest.copy_from_slice(context.finish().as_ref());
    digest
}
