//! Wire messages to model types and back. What comes out of here is checked.

mod egress;
mod identity;
mod run;
mod secret;
mod session;

pub use egress::{allowed_hosts, egress_flow};
pub use identity::{PRINCIPAL_PREFIX, expires_in, principal_name};
pub use run::{command, exited};
pub use secret::{secret_name, secret_value};
pub use session::{limits, phase_filter, session, session_id, session_spec, tenant_filter};

use k8e_model::{Env, Error};
use std::collections::{BTreeMap, HashMap};

fn env(map: HashMap<String, String>) -> Result<Env, Error> {
    map.into_iter().collect::<BTreeMap<_, _>>().try_into()
}
