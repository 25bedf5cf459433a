//! Requests of `k8e.v1` clients: decoding and conversion to model types. The first byte selects the call.

use super::model::{check_env, check_path};
use crate::outcome;
use k8e_api::{convert, v1};
use k8e_model::{
    Command, Error, Limits, Program, RULES_MAX, RunRequest, RunTarget, SECRET_REFS_MAX, SessionSpec,
};
use prost::Message;

pub(super) fn requests(bytes: &[u8]) -> u64 {
    let Some((kind, message)) = bytes.split_first() else {
        return 0;
    };
    let told = match kind % 16 {
        0 => with(message, create),
        1 => with(message, run),
        2 => with(message, background),
        3 => with(message, terminal),
        4 => with(message, |m: v1::UpdateAllowedHostsRequest| {
            convert::session_id(&m.session_id)?;
            let policy = convert::allowed_hosts(&m.hosts)?;
            assert!(policy.rules().len() <= RULES_MAX);
            Ok(())
        }),
        5 => with(message, |m| convert::approval_request(m).map(drop)),
        6 => with(message, |m: v1::DecideApprovalRequest| {
            convert::approval_id(&m.approval_id)?;
            convert::approval_reason(m.reason).map(drop)
        }),
        7 => with(message, |m: v1::PutSnapshotRequest| {
            convert::snapshot_name(&m.name)?;
            convert::snapshot_layers(m.layers).map(drop)
        }),
        8 => with(message, |m: v1::SetSecretRequest| {
            convert::principal_name(&m.principal)?;
            let name = convert::secret_name(&m.name, &m.key)?;
            let again = convert::secret_name(name.name(), name.key());
            assert_eq!(again.as_ref(), Ok(&name));
            convert::secret_value(m.value).map(drop)
        }),
        9 => with(message, |m: v1::CreateKeyRequest| {
            convert::principal_name(&m.principal)?;
            convert::expires_in(m.expires_in_s).map(drop)
        }),
        10 => with(message, |m: v1::WriteTerminalRequest| {
            convert::terminal_id(&m.terminal_id)?;
            convert::terminal_input(&m.data)
        }),
        11 => with(message, |m: v1::ResizeTerminalRequest| {
            convert::terminal_size(m.rows, m.cols).map(drop)
        }),
        12 => with(message, |m: v1::ReadFileRequest| check_path(&m.path)),
        13 => with(message, |m: v1::MoveFileRequest| {
            check_path(&m.from)?;
            check_path(&m.to)
        }),
        14 => with(message, |m: v1::ListSessionsRequest| {
            convert::phase_filter(&m.phase)?;
            convert::tenant_filter(&m.tenant).map(drop)
        }),
        _ => with(message, |m: v1::RunRequest| match m.message {
            Some(v1::run_request::Message::Start(start)) => run(start),
            _ => Ok(()),
        }),
    };
    outcome(&format!("{}{told}", kind % 16))
}

/// The result of a call with this message. A message that was decoded round-trips.
pub(super) fn with<M: Message + Default + PartialEq + Clone>(
    bytes: &[u8],
    call: impl FnOnce(M) -> Result<(), Error>,
) -> String {
    let Ok(message) = M::decode(bytes) else {
        return "no message".to_owned();
    };
    let again = M::decode(message.encode_to_vec().as_slice());
    assert!(again.is_ok_and(|again| again == message));
    match call(message) {
        Ok(()) => "ok".to_owned(),
        Err(error) => {
            assert!(!error.message.is_empty());
            error.message
        }
    }
}

fn create(message: v1::CreateSessionRequest) -> Result<(), Error> {
    check_spec(&convert::session_spec(message)?);
    Ok(())
}

fn run(start: v1::RunStart) -> Result<(), Error> {
    check_run(&convert::run_request(start)?);
    Ok(())
}

fn background(start: v1::RunStart) -> Result<(), Error> {
    let request = convert::background_request(start)?;
    assert!(!request.command.stdin);
    check_run(&request);
    Ok(())
}

fn check_run(request: &RunRequest) {
    check_command(&request.command);
    match &request.target {
        RunTarget::Tenant(spec) | RunTarget::Fresh(spec) => check_spec(spec),
        RunTarget::Existing(_) => {}
    }
}

fn terminal(mut request: v1::CreateTerminalRequest) -> Result<(), Error> {
    let (command, _) = convert::terminal_command(&mut request)?;
    check_command(&command);
    Ok(())
}

pub(super) fn check_spec(spec: &SessionSpec) {
    check_env(&spec.env);
    assert!(spec.secrets.iter().count() <= SECRET_REFS_MAX);
    if let Ok(limits) = spec.limits.or(Limits::default()) {
        assert!(limits.memory_bytes > 0 && limits.cpu_millis > 0);
        assert!(limits.pids > 0 && limits.disk_bytes > 0);
    }
    if let Some(policy) = &spec.egress {
        assert!(policy.rules().len() <= RULES_MAX);
    }
}

pub(super) fn check_command(command: &Command) {
    check_env(&command.env);
    match &command.program {
        Program::Argv(args) => {
            assert!(!args.is_empty());
            assert!(args.iter().all(|arg| !arg.contains(&0)));
        }
        Program::Code { .. } => {}
    }
    let texts = [&command.cwd, &command.user];
    assert!(texts.into_iter().flatten().all(|text| !text.contains('\0')));
}
