//! The libFuzzer program: `cargo xtask fuzz --coverage` builds it with instrumented code and runs it once
//! for each target, which an environment variable names.
#![no_main]

use k8e_fuzz::targets::TARGETS;
use k8e_fuzz::{Target, coverage, run};
use std::sync::LazyLock;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var(coverage::TARGET_VARIABLE).unwrap_or_default();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| {
        panic!(
            "{} names no target: {name:?}; start this with `cargo xtask fuzz --coverage`",
            coverage::TARGET_VARIABLE
        )
    })
});

// A panic aborts the process, and libFuzzer saves the input.
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Err(what) = run::feed(&TARGET, input) {
        panic!("{what}");
    }
});
