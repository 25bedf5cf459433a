//! Requests of `sandbox.v1` clients: decoding and conversion to model types. The first byte selects the call.

use super::api::{check_command, check_spec, with};
use super::model::check_path;
use crate::outcome;
use k8e_api::convert::{self, sandbox_v1};
use k8e_api::sandbox_v1 as k8e;
use k8e_model::{Program, SubAgentSpec};

pub(super) fn requests(bytes: &[u8]) -> u64 {
    let Some((kind, message)) = bytes.split_first() else {
        return 0;
    };
    let told = match kind % 8 {
        0 => with(message, |m: k8e::CreateSessionRequest| {
            check_spec(&sandbox_v1::session_spec(m)?);
            Ok(())
        }),
        1 => with(message, |m: k8e::ExecRequest| {
            sandbox_v1::session_id(&m.session_id)?;
            check_command(&sandbox_v1::command(&m)?);
            check_command(&sandbox_v1::background_command(&m)?);
            Ok(())
        }),
        2 => with(message, |m: k8e::PipInstallRequest| {
            let command = sandbox_v1::pip_command(&m.packages)?;
            check_command(&command);
            let Program::Argv(args) = command.program else {
                panic!("pip runs without a shell");
            };
            // The requested packages are at the end, and none of them is an option.
            let asked = &args[args.len() - m.packages.len()..];
            assert!(asked.iter().all(|arg| !arg.starts_with(b"-")));
            Ok(())
        }),
        3 => with(message, |m: k8e::CreateTerminalRequest| {
            check_command(&sandbox_v1::terminal_command(m)?.0);
            Ok(())
        }),
        4 => with(message, |m: k8e::WriteFileRequest| {
            let (_, permissions) = sandbox_v1::write_mode(&m.mode);
            assert!(permissions <= 0o7777);
            check_path(m.path.as_bytes())
        }),
        5 => with(message, |m: k8e::SnapshotPutRequest| {
            convert::snapshot_name(&m.name)?;
            convert::snapshot_layers(m.layers).map(drop)
        }),
        6 => with(message, |m: k8e::ExposeServiceRequest| {
            convert::service_port(m.port.into())?;
            convert::service_host(&m.host).map(drop)
        }),
        _ => with(message, |m: k8e::RunSubAgentRequest| {
            sandbox_v1::session_id(&m.parent_session_id)?;
            let spec = SubAgentSpec::new(&m.agent_type, &m.workspace_path)?;
            assert!(spec.cwd().starts_with("/workspace"));
            Ok(())
        }),
    };
    outcome(&format!("{}{told}", kind % 8))
}
