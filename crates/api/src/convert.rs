//! Wire messages to model types and back. What comes out of here is checked.

mod background;
pub mod compat;
mod egress;
mod identity;
mod run;
mod secret;
mod session;
mod terminal;

pub use background::{background_command, background_run, run_id};
pub use egress::{allowed_hosts, egress_flow};
pub use identity::{PRINCIPAL_PREFIX, expires_in, principal_name};
pub use run::{command, exited};
pub use secret::{secret_name, secret_value};
pub use session::{limits, phase_filter, session, session_id, session_spec, tenant_filter};
pub use terminal::{terminal_command, terminal_grace, terminal_id, terminal_input, terminal_size};

use k8e_model::{Env, Error};
use std::collections::{BTreeMap, HashMap};

fn env(map: HashMap<String, String>) -> Result<Env, Error> {
    map.into_iter().collect::<BTreeMap<_, _>>().try_into()
}
