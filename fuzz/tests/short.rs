//! Short run of every target. `cargo xtask fuzz TARGET --seconds N` runs one for longer.

use k8e_fuzz::targets::TARGETS;
use k8e_fuzz::{corpus, run};
use std::time::Duration;

/// Time of each target. All targets are one test, since memory is counted for the whole process.
const TIME: Duration = Duration::from_secs(2);

/// Fixed seed, so that CI is deterministic. Long runs use a random one.
const SEED: u64 = 5;

#[test]
fn no_target_crashes() {
    let broken: Vec<String> = TARGETS
        .iter()
        .filter_map(|target| run::run(target, SEED, TIME).err())
        .map(|crash| crash.to_string())
        .collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn samples_exist_and_are_small() {
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
