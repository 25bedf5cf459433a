//! Injection: environment variables and volumes that a claim adds to a cold-started sandbox, if the template allows it.

use crate::crd::{
    ClaimEnv, InjectionPolicy, SandboxClaim, SandboxSpec, SandboxTemplate, VolumeClaimTemplate,
};
use crate::error::{Error, Result};
use k8s_openapi::api::core::v1::{Container, EnvVar, PodSpec};
use std::collections::BTreeSet;

const ENV: &str = "EnvVarsInjectionRejected";
const VOLUMES: &str = "VolumeClaimTemplatesError";

/// Adds the claim's environment variables and volumes to the spec of its sandbox.
pub(super) fn into(
    spec: &mut SandboxSpec,
    claim: &SandboxClaim,
    template: &SandboxTemplate,
) -> Result<()> {
    let env = claim.spec.env.as_deref().unwrap_or_default();
    let policy = template.spec.env_vars_injection_policy.unwrap_or_default();
    if !env.is_empty() && policy == InjectionPolicy::Disallowed {
        return refuse(
            ENV,
            "the template does not allow environment variables from claims".to_owned(),
        );
    }
    for variable in env {
        add_variable(&mut spec.pod_template.spec, variable, policy)?;
    }
    let volumes = claim
        .spec
        .volume_claim_templates
        .as_deref()
        .unwrap_or_default();
    if volumes.is_empty() {
        return Ok(());
    }
    let policy = template
        .spec
        .volume_claim_templates_policy
        .unwrap_or_default();
    add_volumes(
        spec.volume_claim_templates.get_or_insert_default(),
        volumes,
        policy,
    )
}

fn add_variable(pod: &mut PodSpec, variable: &ClaimEnv, policy: InjectionPolicy) -> Result<()> {
    let container = container(pod, variable.container_name.as_deref())?;
    if container
        .env_from
        .as_ref()
        .is_some_and(|from| !from.is_empty())
        && policy == InjectionPolicy::Allowed
    {
        return refuse(
            ENV,
            format!(
                "container \"{}\" takes variables from elsewhere (envFrom): what would be overridden is not known",
                container.name
            ),
        );
    }
    let env = container.env.get_or_insert_default();
    let value = EnvVar {
        name: variable.name.clone(),
        value: Some(variable.value.clone()),
        value_from: None,
    };
    match env.iter_mut().find(|known| known.name == variable.name) {
        None => env.push(value),
        Some(known) if policy == InjectionPolicy::Overrides => *known = value,
        Some(_) => {
            let name = &variable.name;
            return refuse(
                ENV,
                format!(
                    "environment variable \"{name}\" is set by the template and may not be overridden"
                ),
            );
        }
    }
    Ok(())
}

fn container<'a>(pod: &'a mut PodSpec, name: Option<&str>) -> Result<&'a mut Container> {
    let found = match name.filter(|name| !name.is_empty()) {
        None => pod.containers.first_mut(),
        Some(name) => {
            let init = pod.init_containers.iter_mut().flatten();
            pod.containers
                .iter_mut()
                .chain(init)
                .find(|c| c.name == name)
        }
    };
    found.ok_or_else(|| Error::Refused {
        reason: ENV,
        message: format!(
            "the template has no container \"{}\"",
            name.unwrap_or_default()
        ),
    })
}

fn add_volumes(
    into: &mut Vec<VolumeClaimTemplate>,
    added: &[VolumeClaimTemplate],
    policy: InjectionPolicy,
) -> Result<()> {
    if policy == InjectionPolicy::Disallowed {
        return refuse(
            VOLUMES,
            "the template does not allow volumes from claims".to_owned(),
        );
    }
    let mut names = BTreeSet::new();
    for volume in added {
        let name = volume.name();
        if name.is_empty() {
            return refuse(VOLUMES, "a volume claim template has no name".to_owned());
        }
        if !names.insert(name) {
            return refuse(
                VOLUMES,
                format!("volume claim template \"{name}\" is given twice"),
            );
        }
        match into.iter_mut().find(|known| known.name() == name) {
            None => into.push(volume.clone()),
            Some(known) if policy == InjectionPolicy::Overrides => *known = volume.clone(),
            Some(_) => {
                return refuse(
                    VOLUMES,
                    format!(
                        "volume claim template \"{name}\" is set by the template and may not be overridden"
                    ),
                );
            }
        }
    }
    Ok(())
}

fn refuse(reason: &'static str, message: String) -> Result<()> {
    Err(Error::Refused { reason, message })
}
