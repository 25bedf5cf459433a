//! Requests of the server to the root launcher, as a compromised server could send them.

use crate::outcome;
use k8e_driver::fuzzing;
use k8e_model::Limits;

pub(super) fn requests(bytes: &[u8]) -> u64 {
    let max = Limits::default();
    let read = fuzzing::launcher_request(bytes, &max);
    if let Ok(request) = &read {
        for id in &request.sandboxes {
            let plain = id
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
            assert!(plain && !id.is_empty() && id.len() <= 63, "an id {id:?}");
        }
        if let Some(limits) = &request.limits {
            let within = limits.memory_bytes <= max.memory_bytes
                && limits.cpu_millis <= max.cpu_millis
                && limits.pids <= max.pids
                && limits.disk_bytes <= max.disk_bytes;
            assert!(within, "limits above the maximum: {limits:?}");
        }
        assert_eq!(
            fuzzing::launcher_request(request.json.as_bytes(), &max).map(|again| again.json),
            Ok(request.json.clone()),
            "what is written is read as it was"
        );
    }
    outcome(&read.map_or_else(|reason| reason, |request| request.json))
}
