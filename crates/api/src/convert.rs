//! Wire messages to model types and back. What comes out of here is checked.

mod approval;
mod background;
mod egress;
mod exposure;
mod identity;
mod run;
pub mod sandbox_v1;
mod secret;
mod session;
mod snapshot;
mod template;
mod terminal;

pub use approval::{
    approval, approval_action, approval_id, approval_reason, approval_request, session_filter,
};
pub use background::{background_request, background_run, run_id};
pub use egress::{allowed_hosts, egress_flow};
pub use exposure::{service_host, service_port};
pub use identity::{PRINCIPAL_PREFIX, expires_in, principal_name};
pub use run::{exited, run_request, run_target};
pub use secret::{secret_name, secret_value};
pub use session::{
    fork_spec, limits, phase_filter, session, session_id, session_spec, sub_agent_spec,
    tenant_filter,
};
pub use snapshot::{snapshot_layers, snapshot_name};
pub use template::template_name;
pub use terminal::{terminal_command, terminal_grace, terminal_id, terminal_input, terminal_size};

use k8e_model::{Env, Error};
use std::collections::{BTreeMap, HashMap};

fn env(map: HashMap<String, String>) -> Result<Env, Error> {
    map.into_iter().collect::<BTreeMap<_, _>>().try_into()
}
