//! Every target for a moment. `cargo xtask fuzz TARGET --seconds N` does it for longer.

use k8e_fuzz::targets::TARGETS;
use k8e_fuzz::{corpus, run};
use std::time::Duration;

/// Of each target; all of them are one test, since memory is counted for the whole process.
const TIME: Duration = Duration::from_secs(2);

/// The same every time: what lands must not fail by luck. Long runs take another each.
const SEED: u64 = 5;

#[test]
fn nothing_breaks() {
    let broken: Vec<String> = TARGETS
        .iter()
        .filter_map(|target| run::run(target, SEED, TIME).err())
        .map(|crash| crash.to_string())
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn samples_are_small_and_lead_somewhere() {
    for target in TARGETS {
        let samples = corpus::load(target).expect("each target has a corpus");
        assert!(samples.len() >= 4, "{}", target.name);
        for sample in &samples {
            assert!(sample.len() <= target.bytes_max, "{}", target.name);
            assert!(
                sample.len() <= 16 * 1024,
                "{}: too large to check in",
                target.name
            );
        }
    }
}
