//! Random streams. Every random number is a function of the run's seed and of the coordinates of its use.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// The purpose of a stream. Streams of different purposes are independent, even if their coordinates are
/// equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Initialisation = 1,
    Demonstration = 2,
    Problem = 3,
    Sampling = 4,
    Shuffle = 5,
    Evaluation = 6,
    RouterNoise = 7,
    Adapter = 8,
    Request = 9,
    TokenSelection = 10,
}

/// Returns the stream of `purpose` at `coordinates`, such as (step, prompt, sample, turn), in a run with
/// `seed`.
///
/// SplitMix64 hashes the seed, the purpose and the coordinates into the 256-bit ChaCha key. A stream does
/// therefore not depend on the order in which streams are opened.
pub fn stream(seed: u64, purpose: Purpose, coordinates: &[u64]) -> ChaCha8Rng {
    let mut state = splitmix(seed ^ splitmix(purpose as u64));
    for &coordinate in coordinates {
        state = splitmix(state ^ splitmix(coordinate.wrapping_add(0x5851_f42d_4c95_7f2d)));
    }
    let mut key = [0u8; 32];
    for (i, chunk) in key.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&splitmix(state.wrapping_add(i as u64)).to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// SplitMix64's finaliser (Steele, Lea, Flood 2014).
fn splitmix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngCore;

    #[test]
    fn a_stream_depends_on_seed_purpose_and_every_coordinate() {
        let first = |seed, purpose, coordinates: &[u64]| stream(seed, purpose, coordinates).next_u64();
        let base = first(1, Purpose::Sampling, &[1, 2, 3]);
        assert_eq!(base, first(1, Purpose::Sampling, &[1, 2, 3]));
        for other in [
            first(2, Purpose::Sampling, &[1, 2, 3]),
            first(1, Purpose::Problem, &[1, 2, 3]),
            first(1, Purpose::Sampling, &[1, 3, 2]),
            first(1, Purpose::Sampling, &[1, 2]),
            first(1, Purpose::Sampling, &[1, 2, 3, 0]),
        ] {
            assert_ne!(base, other);
        }
    }
}
