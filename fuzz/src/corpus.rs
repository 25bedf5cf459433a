//! Corpus on disk: checked-in samples, and inputs that crashed a target.

use crate::Target;
use std::io;
use std::path::{Path, PathBuf};

/// Directory of the checked-in samples of a target.
pub fn sample_dir(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target.name)
}

/// Directory of inputs that were found by fuzzing.
pub fn found_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fuzz")
}

/// The checked-in samples of a target, sorted by file name.
pub fn load(target: &Target) -> io::Result<Vec<Vec<u8>>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(sample_dir(target))? {
        paths.push(entry?.path());
    }
    paths.sort();
    paths.iter().map(std::fs::read).collect()
}

/// Saves an input that crashed a target.
pub fn save_crash(target: &str, input: &[u8]) -> io::Result<PathBuf> {
    let dir = found_dir();
    std::fs::create_dir_all(&dir)?;
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = dir.join(format!("{target}-{hash:016x}"));
    std::fs::write(&path, input)?;
    Ok(path)
}
