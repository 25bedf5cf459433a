//! Sessions: what a request asks for, and what an answer shows.

use crate::v1;
use k8e_model::{
    Error, ForkSpec, LifetimeSpec, Limits, LimitsSpec, Phase, Session, SessionId, SessionSpec,
    SubAgentSpec, Template, TenantId,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The session that a client asks for. What the request leaves out is filled in by the engine.
pub fn session_spec(wire: v1::CreateSessionRequest) -> Result<SessionSpec, Error> {
    let asked = wire.limits.unwrap_or_default();
    Ok(SessionSpec {
        id: parse_unless_empty(&wire.session_id)?,
        tenant: parse_unless_empty(&wire.tenant)?,
        client: parse_unless_empty(&wire.client)?.unwrap_or_default(),
        runtime: parse_unless_empty(&wire.runtime)?,
        template: wire.template.parse::<Template>()?,
        env: super::env(wire.env)?,
        labels: wire
            .labels
            .into_iter()
            .collect::<BTreeMap<_, _>>()
            .try_into()?,
        limits: LimitsSpec {
            memory_bytes: unless_zero(asked.memory_bytes),
            cpu_millis: unless_zero(asked.cpu_millis),
            pids: unless_zero(asked.pids),
            disk_bytes: unless_zero(asked.disk_bytes),
        },
        lifetime: LifetimeSpec::from_seconds(wire.ttl_s, wire.idle_timeout_s)?,
        secrets: super::secret::refs(wire.secret_refs)?,
        egress: super::egress::asked_hosts(&wire.allowed_hosts)?,
    })
}

/// The sub-agent that a client asks for.
pub fn sub_agent_spec(wire: &v1::CreateSubAgentRequest) -> Result<SubAgentSpec, Error> {
    SubAgentSpec::new(&wire.agent_type, &wire.workspace_path)
}

/// The forks that a client asks for.
pub fn fork_spec(wire: &v1::ForkSessionRequest) -> Result<ForkSpec, Error> {
    ForkSpec::new(wire.count, wire.ttl_s)
}

/// The session that a call names.
pub fn session_id(text: &str) -> Result<SessionId, Error> {
    text.parse()
}

/// Which phases a list shows: empty is `active`, none is all of them.
pub fn phase_filter(text: &str) -> Result<Option<Phase>, Error> {
    match text {
        "" => Ok(Some(Phase::Active)),
        text if text.eq_ignore_ascii_case("all") => Ok(None),
        text => text.parse().map(Some),
    }
}

/// The tenant whose sessions a list shows; empty is all of them.
pub fn tenant_filter(text: &str) -> Result<Option<TenantId>, Error> {
    parse_unless_empty(text)
}

/// A session's record as a message. What only the running server knows (its expiry, its network, the limits it hit) is
/// filled in by the caller.
pub fn session(session: &Session) -> v1::Session {
    let (parent, kind, cwd) = match &session.sub_agent {
        Some(sub) => (sub.parent.to_string(), sub.kind.clone(), sub.cwd.clone()),
        None => Default::default(),
    };
    v1::Session {
        session_id: session.id.to_string(),
        tenant: session.tenant.to_string(),
        owner: session.owner.clone(),
        phase: session.phase.as_str().to_owned(),
        reason: session.reason.clone(),
        runtime: session.runtime.to_string(),
        template: session.template.to_string(),
        // Values can be secrets: only the names are ever shown.
        env_keys: session.env.iter().map(|(key, _)| key.to_owned()).collect(),
        labels: session
            .labels
            .iter()
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect(),
        limits: Some(limits(&session.limits)),
        created_at_unix_ms: session.created_at,
        expires_at_unix_ms: 0,
        last_used_unix_ms: session.last_used,
        idle_timeout_s: session.lifetime.idle.map_or(-1, seconds),
        network: String::new(),
        oom_kills: 0,
        pids_refused: 0,
        allowed_hosts: session.egress.entries(),
        background_runs: 0,
        parent_session_id: parent,
        agent_type: kind,
        cwd,
        origin: session.origin.as_str().to_owned(),
        client: session.client.to_string(),
        secret_env_vars: session
            .secrets
            .iter()
            .map(|wanted| wanted.env_var.clone())
            .collect(),
    }
}

/// What one sandbox may use.
pub fn limits(limits: &Limits) -> v1::Limits {
    v1::Limits {
        memory_bytes: limits.memory_bytes,
        cpu_millis: limits.cpu_millis,
        pids: limits.pids,
        disk_bytes: limits.disk_bytes,
    }
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

/// A number of a request, where 0 is not set.
fn unless_zero<T: Default + PartialEq>(number: T) -> Option<T> {
    (number != T::default()).then_some(number)
}

fn parse_unless_empty<T: std::str::FromStr<Err = Error>>(text: &str) -> Result<Option<T>, Error> {
    if text.is_empty() {
        Ok(None)
    } else {
        text.parse().map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8e_model::{RuntimeKind, TimeLimit};

    #[test]
    fn an_empty_request_is_all_defaults() {
        assert_eq!(
            session_spec(v1::CreateSessionRequest::default()).unwrap(),
            SessionSpec::default()
        );
    }

    #[test]
    fn what_is_asked_for_is_taken_and_checked() {
        let asked = v1::CreateSessionRequest {
            session_id: "mine".into(),
            tenant: "project".into(),
            runtime: "native".into(),
            limits: Some(v1::Limits {
                pids: 64,
                ..Default::default()
            }),
            ttl_s: 60,
            idle_timeout_s: -1,
            allowed_hosts: vec!["example.com".into()],
            ..Default::default()
        };
        let spec = session_spec(asked.clone()).unwrap();
        assert_eq!(spec.id.unwrap().as_str(), "mine");
        assert_eq!(spec.runtime, Some(RuntimeKind::Native));
        assert_eq!(spec.egress.unwrap().entries(), ["example.com"]);
        assert_eq!((spec.limits.pids, spec.limits.cpu_millis), (Some(64), None));
        assert_eq!(
            spec.lifetime,
            LifetimeSpec {
                ttl: TimeLimit::After(Duration::from_secs(60)),
                idle: TimeLimit::Never
            }
        );

        type Break = fn(&mut v1::CreateSessionRequest);
        let broken: [Break; 8] = [
            |r| r.client = "No Word".into(),
            |r| r.session_id = "../x".into(),
            |r| r.tenant = "A".into(),
            |r| r.runtime = "docker".into(),
            |r| r.template = "../nothing".into(),
            |r| r.ttl_s = -7,
            |r| r.allowed_hosts.push("none".into()),
            |r| r.env.extend([("A=B".to_owned(), String::new())]),
        ];
        for break_it in broken {
            let mut request = asked.clone();
            break_it(&mut request);
            assert!(session_spec(request).is_err());
        }
    }

    #[test]
    fn phases_filter() {
        assert_eq!(phase_filter("").unwrap(), Some(Phase::Active));
        assert_eq!(phase_filter("All").unwrap(), None);
        assert_eq!(phase_filter("Ended").unwrap(), Some(Phase::Ended));
        assert!(phase_filter("running").is_err());
    }
}
