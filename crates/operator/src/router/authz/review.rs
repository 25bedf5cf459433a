//! Asks the cluster whose token it is, and whether he may: TokenReview, then SubjectAccessReview.
//!
//! The right is `create` on `sandboxes/proxy` of that sandbox, whatever the method of the request: who can talk to
//! the runtime in a sandbox can run code there, also with a GET. So it is one right, like `pods/exec`, and none that
//! roles for readers include.

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

/// Questions to the API server at once: a flood of made-up tokens is not passed on to it.
const AT_ONCE_MAX: usize = 64;
/// With waiting for a turn.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Of a no: a right that was just given counts soon.
const DENIED_TTL_MAX: Duration = Duration::from_secs(5);

/// SHA-256, of a token or of a token and a sandbox: tokens themselves are not kept.
type Digest = [u8; 32];

pub(in crate::router) struct Reviews {
    tokens: Api<TokenReview>,
    access: Api<SubjectAccessReview>,
    audiences: Option<Vec<String>>,
    turns: Semaphore,
    ttl: Duration,
    /// Whose token; None for nobody's.
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
            turns: Semaphore::new(AT_ONCE_MAX),
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
                let user = self.ask_who(token, of_token).await?;
                let ttl = self.ttl_of(user.is_some());
                (user, Instant::now() + ttl)
            }
        };
        let user = user.ok_or(Denied::Unknown)?;
        let allowed = self.ask_whether(&user, target).await?;
        // Not longer than we know whose token it is: one that was revoked counts for one ttl, not for two.
        let left = until.saturating_duration_since(Instant::now());
        let ttl = self.ttl_of(allowed).min(left);
        self.decisions.put(of_both, allowed, ttl);
        if allowed {
            Ok(())
        } else {
            Err(Denied::Forbidden)
        }
    }

    async fn ask_who(&self, token: &str, key: Digest) -> Result<Option<Arc<UserInfo>>, Denied> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: self.audiences.clone(),
            },
            ..TokenReview::default()
        };
        let answer = self
            .in_turn(self.tokens.create(&PostParams::default(), &review))
            .await?;
        let status = answer.status.unwrap_or_default();
        let meant_for_us = match (&self.audiences, &status.audiences) {
            (None, _) => true,
            (Some(ours), Some(theirs)) => theirs.iter().any(|audience| ours.contains(audience)),
            // An authenticator that does not know audiences says nothing about them.
            (Some(_), None) => false,
        };
        let known = status.authenticated == Some(true) && meant_for_us;
        let user = status.user.filter(|_| known).map(Arc::new);
        self.users
            .put(key, user.clone(), self.ttl_of(user.is_some()));
        Ok(user)
    }

    async fn ask_whether(&self, user: &UserInfo, target: &Target) -> Result<bool, Denied> {
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
            .in_turn(self.access.create(&PostParams::default(), &review))
            .await?;
        let status = answer.status.unwrap_or_default();
        Ok(status.allowed && status.denied != Some(true))
    }

    /// Errors do not tell callers more than that there was one, and the log nothing of the token.
    async fn in_turn<T>(
        &self,
        question: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Denied> {
        let asked = async {
            let _turn = self.turns.acquire().await;
            question.await
        };
        match timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                tracing::warn!(
                    "cannot ask the cluster about a token (may the router create tokenreviews and subjectaccessreviews?): {error}"
                );
                Err(Denied::Unavailable)
            }
            Err(_) => {
                tracing::warn!("the cluster said nothing about a token within {ANSWER_WITHIN:?}");
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

/// Lengths first: no two lists of parts look the same.
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
