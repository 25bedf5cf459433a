//! Fuzz targets for the decoders of untrusted input.
//!
//! A [`Target`] takes bytes and panics when an invariant is broken; time and memory of each input are
//! limited too. The [runner](run) mutates real samples (`corpus/`), and keeps inputs with a new
//! outcome. It needs nothing but the normal compiler, and runs with every `cargo test`. The same
//! targets run in libFuzzer, which is guided by [coverage].

pub mod corpus;
pub mod coverage;
pub mod mutate;
pub mod run;
mod sys;
pub mod targets;

/// A fuzz target: a decoder of untrusted bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target and of its corpus directory.
    pub name: &'static str,
    /// Decodes the bytes as the product does, and panics when an invariant is broken. Returns a hash of
    /// the outcome: inputs with a new outcome are kept.
    pub feed: fn(&[u8]) -> u64,
    /// Dictionary: words that such input contains.
    pub words: &'static [&'static str],
    /// Largest input, in bytes.
    pub bytes_max: usize,
    /// Peak of memory that one input may allocate, in bytes.
    pub memory_max: usize,
}

/// Hash of an outcome, given as text without parts of the input.
pub fn outcome(text: &str) -> u64 {
    const LOOKED_AT: usize = 120;
    let (mut quoted, mut escaped) = (false, false);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text.bytes().take(LOOKED_AT) {
        quoted ^= byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        if !quoted && !byte.is_ascii_digit() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}
