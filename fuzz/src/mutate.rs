//! Mutations: new inputs from old ones.

/// Mutations of one input, at most.
const CHANGES_MAX: u64 = 6;

/// Bytes that one mutation inserts, removes or moves, at most.
const PIECE_MAX: usize = 64;

/// Repetitions of one byte, at most: above most limits of decoders.
const REPEATED_MAX: usize = 5000;

/// Boundary values and separators.
const BYTES: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t /.:-*=\"\\'%@[]{}";

/// Random numbers from a seed (SplitMix64): the same seed gives the same inputs.
#[derive(Clone, Debug)]
pub struct Random(u64);

// === impl Random ===

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits of the sequence.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = end.max(1) as u64;
        usize::try_from(self.next_u64() % end).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        self.next_u64().to_le_bytes()[0]
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }

    /// A random range within `length` bytes.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        let bytes = self.below((length - start).min(PIECE_MAX) + 1);
        start..start + bytes
    }
}

/// A new input from inputs in `pool`, at most `bytes_max` long.
pub fn mutate(random: &mut Random, pool: &[Vec<u8>], words: &[&str], bytes_max: usize) -> Vec<u8> {
    let mut input = random.one(pool).cloned().unwrap_or_default();
    let changes = 1 + random.next_u64() % CHANGES_MAX;
    for _ in 0..changes {
        change(random, &mut input, pool, words);
    }
    input.truncate(bytes_max);
    input
}

fn change(random: &mut Random, input: &mut Vec<u8>, pool: &[Vec<u8>], words: &[&str]) {
    let at = random.below(input.len() + 1);
    match random.below(14) {
        0 => {
            let bit = 1 << random.below(8);
            if let Some(byte) = input.get_mut(at) {
                *byte ^= bit;
            }
        }
        1 => {
            let new = random.byte();
            if let Some(byte) = input.get_mut(at) {
                *byte = new;
            }
        }
        2 => {
            let new = random.one(BYTES).copied().unwrap_or_default();
            match input.get_mut(at) {
                Some(byte) if random.below(2) == 0 => *byte = new,
                _ => input.insert(at, new),
            }
        }
        3 => {
            let bytes = 1 + random.below(8);
            let new: Vec<u8> = (0..bytes).map(|_| random.byte()).collect();
            input.splice(at..at, new);
        }
        4 => {
            let part = random.range(input.len());
            input.drain(part);
        }
        5 => {
            let part = random.range(input.len());
            let copy = input[part].to_vec();
            input.splice(at..at, copy);
        }
        6 => {
            let (from, to) = (random.range(input.len()), random.range(input.len()));
            let copy = input[from].to_vec();
            input.splice(to, copy);
        }
        7 | 8 => {
            let word = random.one(words).copied().unwrap_or_default();
            let over = random.below(2) * word.len().min(input.len() - at);
            input.splice(at..at + over, word.bytes());
        }
        9 => length(random, input, at),
        10 => {
            let other = random.one(pool).cloned().unwrap_or_default();
            let from = random.below(other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        11 => input.truncate(at),
        12 => {
            let byte = match input.get(at) {
                Some(byte) if random.below(2) == 0 => *byte,
                _ => random.byte(),
            };
            let shorter = 1 << random.below(13);
            let count = 1 + random.below(REPEATED_MAX.min(shorter));
            input.splice(at..at, std::iter::repeat_n(byte, count));
        }
        _ => {
            let other = random.one(pool).cloned().unwrap_or_default();
            let part = random.range(other.len());
            input.splice(at..at, other[part].to_vec());
        }
    }
}

/// Overwrites a possible length field: with the right length, off by one, or far off.
fn length(random: &mut Random, input: &mut [u8], at: usize) {
    let left = (input.len() - at) as u64;
    let numbers = [
        left,
        left.wrapping_sub(1),
        left + 1,
        left.wrapping_sub(2),
        left.wrapping_sub(4),
        0,
        1,
        u64::MAX,
        u64::MAX >> 1,
        1 << 31,
        1 << 16,
        1 << 14,
        0x8000,
        0xff,
    ];
    let number = random.one(&numbers).copied().unwrap_or_default();
    let bytes = 1 << random.below(4);
    let number = match random.below(2) {
        0 => number.to_be_bytes()[8 - bytes..].to_vec(),
        _ => number.to_le_bytes()[..bytes].to_vec(),
    };
    for (to, from) in input[at..].iter_mut().zip(number) {
        *to = from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_inputs_within_bounds() {
        let pool = vec![b"hello world".to_vec(), vec![], vec![0; 300]];
        let made = |seed| {
            let mut random = Random::new(seed);
            let one = |_| mutate(&mut random, &pool, &["GET", ""], 1000);
            (0..2000).map(one).collect::<Vec<_>>()
        };
        assert_eq!(made(1), made(1));
        assert_ne!(made(1), made(2));
        assert!(made(3).iter().all(|input| input.len() <= 1000));
        assert!(mutate(&mut Random::new(1), &[], &[], 10).len() <= 10);
    }
}
