//! Notes on standard error about how a command ended: timeout, out of memory, denied egress.

use super::allowing;
use k8e_api::v1;
use std::time::Duration;

/// Host names in one hint: more do not fit into a command to copy.
const HINT_ENTRIES_MAX: usize = 8;

/// The fields of the request that the hints depend on.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked {
    /// Timeout in milliseconds; 0 is the server's default.
    pub(super) timeout_ms: i64,
    /// Whether the session is destroyed after the run.
    pub(super) fresh: bool,
    /// --allowed-hosts; empty is the server's default.
    pub(super) allowed_hosts: Vec<String>,
}

/// One line for each note. With `raw` there is no JSON that has the status.
pub(super) fn notes(
    asked: &Asked,
    session_id: &str,
    exited: &v1::RunExited,
    raw: bool,
) -> Vec<String> {
    let mut notes = Vec::new();
    match exited.status.as_str() {
        "timed_out" if raw => notes.push(format!(
            "the command timed out after {} and was killed with all processes it started; --timeout sets the limit",
            time(asked, exited)
        )),
        "oom_killed" if raw => notes.push(
            "the command was killed: the sandbox reached its memory limit, which cannot be changed; create a session \
             with more, as in `k8e sandbox create --memory 2GiB`"
                .to_owned(),
        ),
        _ => {}
    }
    notes.extend(denied(asked, session_id, &exited.egress_denied));
    notes
}

/// Denied host names, or addresses where there is no name, without duplicates.
pub(super) fn names(flows: &[v1::EgressFlow]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for flow in flows {
        let name = match flow.name.is_empty() {
            true => &flow.address,
            false => &flow.name,
        };
        let name = super::egress::clean(name);
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn denied(asked: &Asked, session_id: &str, flows: &[v1::EgressFlow]) -> Option<String> {
    let names = names(flows);
    if names.is_empty() {
        return None;
    }
    let shown = names.iter().take(HINT_ENTRIES_MAX).cloned();
    let shown = shown.collect::<Vec<_>>().join(", ");
    let mut entries: Vec<String> = Vec::new();
    for entry in flows.iter().filter_map(allowing::entry) {
        if !entries.contains(&entry) && entries.len() < HINT_ENTRIES_MAX {
            entries.push(entry);
        }
    }
    let hint = match (entries.is_empty(), asked.fresh) {
        (true, _) => "no entry of --allowed-hosts can allow it".to_owned(),
        (false, false) => allowing::command(session_id, &entries),
        (false, true) => {
            let before = match asked.allowed_hosts.as_slice() {
                [] => vec!["@default".to_owned()],
                [none] if none == "none" => Vec::new(),
                hosts => hosts.to_vec(),
            };
            let hosts = [before, entries].concat().join(",");
            format!("`--allowed-hosts {hosts}` allows it for the next run")
        }
    };
    Some(format!("the sandbox may not reach {shown}: {hint}"))
}

/// The timeout of the request; else how long the command ran.
fn time(asked: &Asked, exited: &v1::RunExited) -> String {
    let time = match u64::try_from(asked.timeout_ms) {
        Ok(ms @ 1..) => Duration::from_millis(ms),
        _ => Duration::from_secs(exited.duration_us / 1_000_000),
    };
    format!("{time:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(name: &str, reason: &str) -> v1::EgressFlow {
        v1::EgressFlow {
            name: name.to_owned(),
            protocol: v1::EgressProtocol::Dns.into(),
            reason: reason.to_owned(),
            ..Default::default()
        }
    }

    fn exited(status: &str, denied: Vec<v1::EgressFlow>) -> v1::RunExited {
        v1::RunExited {
            status: status.to_owned(),
            duration_us: 30_012_345,
            egress_denied: denied,
            ..Default::default()
        }
    }

    #[test]
    fn a_timeout_is_told_where_no_json_tells_it() {
        let timed_out = exited("timed_out", Vec::new());
        let mut asked = Asked::default();
        assert_eq!(
            notes(&asked, "s", &timed_out, true),
            [
                "the command timed out after 30s and was killed with all processes it started; --timeout sets the limit"
            ]
        );
        asked.timeout_ms = 1500;
        assert!(notes(&asked, "s", &timed_out, true)[0].contains("after 1.5s"));
        assert!(notes(&asked, "s", &timed_out, false).is_empty());
        assert!(notes(&asked, "s", &exited("completed", Vec::new()), true).is_empty());
    }

    #[test]
    fn what_was_denied_is_told_with_a_command_that_works() {
        let flows = vec![
            denied("b.example", "not_allowed"),
            denied("b.example", "not_allowed"),
            denied("$(reboot)", "not_allowed"),
        ];
        let run = exited("completed", flows);
        let mut asked = Asked::default();
        assert_eq!(
            notes(&asked, "sess-a", &run, false),
            ["the sandbox may not reach b.example, $(reboot): \
              `k8e sandbox allow-hosts --session-id sess-a --add b.example` allows it"]
        );
        asked.fresh = true;
        assert_eq!(
            notes(&asked, "sess-a", &run, false),
            [
                "the sandbox may not reach b.example, $(reboot): `--allowed-hosts @default,b.example` allows it for the next run"
            ]
        );
        asked.allowed_hosts = vec!["none".to_owned()];
        assert!(notes(&asked, "s", &run, true)[0].contains("`--allowed-hosts b.example`"));
        let never = exited("completed", vec![denied("b.example", "deny_list")]);
        assert_eq!(
            notes(&asked, "s", &never, true),
            ["the sandbox may not reach b.example: no entry of --allowed-hosts can allow it"]
        );
    }
}
