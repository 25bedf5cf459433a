//! Authentication and rate limiting. Every call passes here before anything of it is used.
//!
//! Flow: the principal, by its credential (an API key before a certificate before the kernel's word) → whether the
//! credential is still valid → the rate limit → the call, which ends when the credential is revoked.

pub(crate) mod fuzzing;
pub(crate) mod login;
pub(crate) mod loopback;
pub(crate) mod middleware;
pub(crate) mod peer;
pub(crate) mod throttle;
pub(crate) mod tls;

use crate::connection_limit::LimitReached;
use crate::metrics::{AUTH_REFUSED, AUTH_WRONG_KEYS};
use crate::rate_limit::{Class, Limiter, RateLimits};
use crate::tls_listener::{KernelIdentity, Nameless, TlsPeer};
use k8e_api::SESSION_HEADER;
use k8e_api::status::to_status;
use k8e_engine::{Certificate, Sessions};
use k8e_model::{ApiKey, Caller, Code, KeyId, Principal, Proof};
use metrics::counter;
use std::net::IpAddr;
use std::sync::Arc;
use throttle::{Throttle, Wrong};
use tonic::codegen::http::{HeaderMap, Request as HttpRequest};
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

/// Authenticates and rate-limits calls of all listeners. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Authenticator(Arc<Inner>);

struct Inner {
    sessions: Sessions,
    /// The group whose members may use the Unix socket, besides root.
    group: String,
    limiter: Limiter,
    throttle: Throttle,
}

/// What a client authenticated with.
#[derive(Clone, Debug)]
pub(crate) enum Credential {
    /// The kernel's word: peer credentials of the Unix socket, or the owner of a loopback connection.
    Kernel,
    /// An API key.
    Key(KeyId),
    /// A client certificate, signed by our authority.
    Certificate(Arc<Certificate>),
}

/// The principal of an authenticated call.
pub(crate) fn principal<T>(request: &Request<T>) -> Result<Principal, Status> {
    let known = request.extensions().get::<Principal>().cloned();
    known.ok_or_else(unauthenticated)
}

/// The principal, its credential, and the session that the client says it works for.
pub(crate) fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
    let principal = principal(request)?;
    let credential = request.extensions().get::<Credential>();
    let proof = credential.ok_or_else(unauthenticated)?.proof();
    let session = request.metadata().get(SESSION_HEADER);
    let session = session.and_then(|id| id.to_str().ok()?.parse().ok());
    Ok(Caller {
        principal,
        proof,
        session,
    })
}

// === impl Credential ===

impl Credential {
    fn proof(&self) -> Proof {
        match self {
            Self::Kernel => Proof::Local,
            Self::Key(id) => Proof::Key(id.clone()),
            Self::Certificate(certificate) => match &certificate.key {
                Some(key) => Proof::Key(key.clone()),
                None => Proof::Certificate(certificate.common_name.clone()),
            },
        }
    }
}

// === impl Authenticator ===

impl Authenticator {
    pub(crate) fn new(sessions: Sessions, group: String, limits: RateLimits) -> Self {
        Self(Arc::new(Inner {
            sessions,
            group,
            limiter: Limiter::new(limits),
            throttle: Throttle::new(),
        }))
    }

    /// Authenticates a call and counts it against the rate limit.
    pub(crate) fn admit<B>(
        &self,
        request: &HttpRequest<B>,
    ) -> Result<(Principal, Credential), Status> {
        let known = if let Some(peer) = request.extensions().get::<TlsPeer>() {
            let from = peer.address.to_canonical().to_string();
            self.by_tls(peer, request.headers())
                .and_then(|known| peer.authenticated().map(|()| known).map_err(full))
                .map(|(who, credential)| (who.calling_from(from), credential))
        } else {
            self.by_peer(request.extensions().get())
        };
        let (who, credential) = known.inspect_err(|refused| {
            if refused.code() != tonic::Code::ResourceExhausted {
                counter!(AUTH_REFUSED).increment(1);
            }
        })?;
        self.0
            .limiter
            .check(&who, Class::of(request.uri().path()))?;
        Ok((who, credential))
    }

    /// Authenticates a call by an API key in a header of its own protocol, and counts it against the rate limit.
    pub(crate) fn admit_key(
        &self,
        from: IpAddr,
        key: Option<&str>,
        class: Class,
    ) -> Result<Principal, Status> {
        let Some(key) = key else {
            counter!(AUTH_REFUSED).increment(1);
            let message = "missing API key: `k8e apikey create` on the server makes one";
            return Err(to_status(Code::Unauthenticated, message));
        };
        let known = self.by_key(from, ApiKey::parse(key).ok());
        let (who, _) = known.inspect_err(|_| counter!(AUTH_REFUSED).increment(1))?;
        self.0.limiter.check(&who, class)?;
        Ok(who.calling_from(from.to_canonical().to_string()))
    }

    /// Counts a call of a principal that was authenticated in another way against the rate limit.
    pub(crate) fn admit_known(&self, who: &Principal, class: Class) -> Result<(), Status> {
        self.0.limiter.check(who, class)
    }

    /// An error once the credential is revoked or has expired.
    pub(crate) fn recheck(&self, credential: &Credential) -> Result<(), Status> {
        let sessions = &self.0.sessions;
        let checked = match credential {
            Credential::Kernel => Ok(()),
            Credential::Key(id) => sessions.valid_key(id).map(drop),
            Credential::Certificate(certificate) => {
                sessions.verify_certificate(certificate).map(drop)
            }
        };
        checked.map_err(|e| to_status(e.code(), &e.to_string()))
    }

    /// Whether this certificate is valid now: not expired, not revoked.
    pub(crate) fn is_valid(&self, certificate: &Certificate) -> bool {
        self.0.sessions.verify_certificate(certificate).is_ok()
    }

    /// Whether a user of this machine is root or a member of the group.
    pub(crate) fn user_may_enter(&self, uid: u32) -> bool {
        peer::user_may_enter(uid, &self.0.group)
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    /// On the Unix socket: root, and members of the group.
    fn by_peer(&self, info: Option<&UdsConnectInfo>) -> Result<(Principal, Credential), Status> {
        let group = &self.0.group;
        let Some(peer) = info.and_then(|info| info.peer_cred) else {
            return Err(to_status(
                Code::Unauthenticated,
                "the kernel does not say who is calling",
            ));
        };
        if !peer::may_enter(peer.uid(), peer.gid(), group) {
            let message = format!(
                "user {} may not use this server: become root, or join the group {group} (`usermod -aG {group} USER`)",
                peer.uid()
            );
            return Err(to_status(Code::Denied, &message));
        }
        let who = Principal::local().calling_from(format!("uid:{}", peer.uid()));
        Ok((who, Credential::Kernel))
    }

    /// Over TLS: an API key, a certificate, or, with --trust-loopback, root or a member of the group on this machine.
    fn by_tls(
        &self,
        peer: &TlsPeer,
        headers: &HeaderMap,
    ) -> Result<(Principal, Credential), Status> {
        if let Some(key) = headers.get("authorization") {
            let key = key.to_str().ok().and_then(bearer);
            return self.by_key(peer.address, key);
        }
        match &peer.certificate {
            Some(Ok(certificate)) => {
                let who = self.0.sessions.verify_certificate(certificate);
                let who = who.map_err(|e| to_status(e.code(), &e.to_string()))?;
                Ok((who, Credential::Certificate(Arc::clone(certificate))))
            }
            Some(Err(Nameless)) => Err(to_status(
                Code::Unauthenticated,
                "the client certificate has no usable common name",
            )),
            None if peer.kernel == KernelIdentity::Trusted => {
                Ok((Principal::loopback(), Credential::Kernel))
            }
            None => Err(self.missing_credentials(peer)),
        }
    }

    fn missing_credentials(&self, peer: &TlsPeer) -> Status {
        let group = &self.0.group;
        let on_this_machine = match peer.kernel {
            KernelIdentity::Refused => format!(
                ". --trust-loopback lets in only root and members of the group {group}, by a plain connection that is open"
            ),
            _ if peer.address.to_canonical().is_loopback() => format!(
                ". On this machine root and members of the group {group} can use the Unix socket (k8e.sock in the data directory) without a key, or start the server with --trust-loopback"
            ),
            KernelIdentity::NotAsked | KernelIdentity::Trusted => String::new(),
        };
        let message = format!(
            "missing API key or client certificate: give a key with --apikey or K8E_SANDBOX_APIKEY (`k8e apikey create` \
             on the server makes one), or log in with it once (`k8e login`){on_this_machine}"
        );
        to_status(Code::Unauthenticated, &message)
    }

    fn by_key(&self, from: IpAddr, key: Option<ApiKey>) -> Result<(Principal, Credential), Status> {
        let throttle = &self.0.throttle;
        let verified = key.and_then(|key| self.0.sessions.verify_key(&key).ok());
        let Some((who, id)) = verified else {
            counter!(AUTH_WRONG_KEYS).increment(1);
            return Err(match throttle.wrong(from) {
                Wrong::StillTooMany => too_many_wrong(),
                Wrong::TooMany => {
                    tracing::warn!("too many wrong API keys from {from}: it is slowed down");
                    too_many_wrong()
                }
                Wrong::Invalid => invalid_key(),
            });
        };
        if !throttle.right(from, &id) {
            return Err(too_many_wrong());
        }
        Ok((who, Credential::Key(id)))
    }
}

fn unauthenticated() -> Status {
    to_status(
        Code::Unauthenticated,
        "unauthenticated: no credentials on this connection",
    )
}

/// The API key of an `authorization` header. `sandbox.v1` clients leave the scheme out.
fn bearer(text: &str) -> Option<ApiKey> {
    let text = text.trim();
    let key = match text.split_once(' ') {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => key.trim(),
        _ => text,
    };
    ApiKey::parse(key).ok()
}

fn invalid_key() -> Status {
    let error = k8e_engine::Error::KeyInvalid;
    to_status(error.code(), &error.to_string())
}

fn full(LimitReached { authenticated_max }: LimitReached) -> Status {
    let message = format!(
        "this server has {authenticated_max} connections of authenticated clients open, and takes no more: retry, and use one connection for many calls"
    );
    to_status(Code::Exhausted, &message)
}

fn too_many_wrong() -> Status {
    to_status(
        Code::Exhausted,
        "too many wrong API keys came from this address: wait a little, and check the key",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_with_a_scheme_or_without() {
        let key = ApiKey::random();
        let text = key.reveal();
        for spelling in [
            format!("Bearer {text}"),
            format!("bearer  {text} "),
            text.clone(),
        ] {
            assert_eq!(bearer(&spelling), Some(key.clone()), "{spelling}");
        }
        for bad in [
            "",
            "Bearer",
            "Bearer ",
            "Basic abc",
            &format!("Basic {text}"),
        ] {
            assert_eq!(bearer(bad), None, "{bad}");
        }
    }
}
