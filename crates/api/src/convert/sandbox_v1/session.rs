//! Sessions: the fields of `sandbox.v1` are some of `k8e.v1` under other names.

use crate::sandbox_v1::{CreateSessionRequest, GetSessionResponse};
use crate::{convert, v1};
use k8e_model::{ClientKind, EgressPolicy, Error, Phase, Session, SessionSpec, UnixMillis};

/// The session that a `sandbox.v1` client asks for. What the request leaves out is filled in by the engine.
pub fn session_spec(wire: CreateSessionRequest) -> Result<SessionSpec, Error> {
    let secret_refs = wire.secret_refs.into_iter().map(|wanted| v1::SecretRef {
        secret_name: wanted.secret_name,
        key: wanted.key,
        env_var: wanted.env_var,
    });
    let ours = v1::CreateSessionRequest {
        session_id: wire.session_id,
        tenant: wire.tenant_id,
        runtime: wire.runtime_class,
        env: wire.env,
        allowed_hosts: wire.allowed_hosts,
        secret_refs: secret_refs.collect(),
        client: ClientKind::sandbox_v1().to_string(),
        ..Default::default()
    };
    convert::session_spec(ours)
}

/// A session as a `sandbox.v1` message.
pub fn session(
    session: &Session,
    expires_at: Option<UnixMillis>,
    background_runs: usize,
) -> GetSessionResponse {
    GetSessionResponse {
        session_id: session.id.to_string(),
        phase: phase(session.phase),
        runtime_class: session.runtime.to_string(),
        // A sandbox has no address that leads to it.
        pod_ip: String::new(),
        tenant_id: session.tenant.to_string(),
        expires_at: expires_at.map_or(0, |ms| ms.div_euclid(1000)),
        // Values can be secrets: only the names are ever shown.
        env_keys: session.env.iter().map(|(key, _)| key.to_owned()).collect(),
        secret_env_vars: session
            .secrets
            .iter()
            .map(|wanted| wanted.env_var.clone())
            .collect(),
        background_runs: i32::try_from(background_runs).unwrap_or(i32::MAX),
        allowed_hosts: allowed_hosts(&session.egress),
    }
}

/// Allowed hosts: clients read the list, add to it and send it back; nothing allowed is an empty list.
pub fn allowed_hosts(policy: &EgressPolicy) -> Vec<String> {
    if *policy == EgressPolicy::None {
        return Vec::new();
    }
    policy.entries()
}

/// With a capital, as in the Go server.
fn phase(phase: Phase) -> String {
    let (first, rest) = phase.as_str().split_at(1);
    first.to_uppercase() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox_v1::SecretRef;

    #[test]
    fn fields_arrive_under_our_names() {
        let wire = CreateSessionRequest {
            session_id: "mine".into(),
            tenant_id: "project".into(),
            allowed_hosts: vec!["example.com".into()],
            runtime_class: "native".into(),
            env: [("A".to_owned(), "1".to_owned())].into(),
            secret_refs: vec![SecretRef {
                secret_name: "github".into(),
                key: "token".into(),
                env_var: "TOKEN".into(),
            }],
        };
        let spec = session_spec(wire.clone()).unwrap();
        assert_eq!(spec.id.unwrap().as_str(), "mine");
        assert_eq!(spec.tenant.unwrap().as_str(), "project");
        assert_eq!(spec.runtime.unwrap().as_str(), "native");
        assert_eq!(spec.egress.unwrap().entries(), ["example.com"]);
        assert_eq!(spec.env.iter().next(), Some(("A", "1")));
        assert_eq!(spec.secrets.iter().next().unwrap().secret.key(), "token");

        let refused = |change: fn(&mut CreateSessionRequest)| {
            let mut wire = wire.clone();
            change(&mut wire);
            let refused = session_spec(wire);
            refused.unwrap_err().message
        };
        let text = refused(|wire| drop(wire.env.insert("A=B".into(), String::new())));
        assert!(text.starts_with("env: "), "{text}");
        let text = refused(|wire| wire.secret_refs[0].env_var.clear());
        assert!(text.starts_with("secret_refs: "), "{text}");
    }

    #[test]
    fn phases_have_a_capital_and_none_is_no_host() {
        assert_eq!(phase(Phase::Active), "Active");
        assert!(allowed_hosts(&EgressPolicy::None).is_empty());
        assert_eq!(allowed_hosts(&EgressPolicy::All), ["all"]);
    }
}
