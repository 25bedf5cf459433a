//! Decoders that an outsider feeds, fed with what no client would send.
//!
//! A [`Target`] takes bytes and panics when something is not as it must be: that is all a decoder
//! can do wrong here, besides taking for ever or too much memory, and those are watched too. The
//! [runner](run) mutates real samples (`corpus/`), and keeps what led to something new. It needs no
//! compiler but the one that builds k8e, and runs with every `cargo test`. The same targets run in
//! libFuzzer, which is guided by [coverage].

pub mod corpus;
pub mod coverage;
pub mod mutate;
pub mod run;
mod sys;
pub mod targets;

/// Something that an outsider can send bytes to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Names it, and its corpus.
    pub name: &'static str,
    /// Does with the bytes what the product does, and panics when that breaks a promise. Returns
    /// what became of them, as a number: inputs with a new one are worth keeping.
    pub feed: fn(&[u8]) -> u64,
    /// What such input is made of.
    pub words: &'static [&'static str],
    /// Longer inputs are not tried.
    pub bytes_max: usize,
    /// What one input may have allocated at any moment.
    pub memory_max: usize,
}

/// A number for what became of an input: a text without what the input itself brought into it.
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
