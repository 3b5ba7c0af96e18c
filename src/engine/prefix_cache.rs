//! Keys and values of prompts and answers, kept for later requests that begin with the same tokens.
//!
//! The unit is a block of [`BLOCK`] tokens at all layers. Sequences share the blocks, and a full block never
//! changes. The bits of a block do not depend on the chunks in which its tokens were read, so a reused prefix
//! changes no result. The end of a sequence is kept too, so that the next turn of a conversation reads only
//! what is new.

use crate::model::cache::{CacheBlock, SequenceCache};
use crate::ops::kv_cache::BLOCK;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// The key of a block: a digest of the previous block's key and the block's own tokens. The first block has
/// the version of the weights in place of a previous key. So the key stands for the version and for all
/// tokens of the sequence up to the end of the block.
pub(super) type BlockKey = [u8; 32];

/// Appends the missing keys to `keys`, so that it has one for each whole block of `tokens`. `version` is the
/// id of the version of the weights.
pub(super) fn extend_keys(keys: &mut Vec<BlockKey>, version: u64, tokens: &[u32]) {
    for block in tokens.chunks_exact(BLOCK).skip(keys.len()) {
        let mut hasher = blake3::Hasher::new();
        match keys.last() {
            Some(previous) => hasher.update(previous),
            None => hasher.update(&version.to_le_bytes()),
        };
        for token in block {
            hasher.update(&token.to_le_bytes());
        }
        keys.push(*hasher.finalize().as_bytes());
    }
}

/// Up to `blocks_max` blocks, by key. The least recently used block is removed first. Among blocks with the
/// same last use, the one that is last in its sequence goes first.
pub(super) struct PrefixCache {
    blocks_max: usize,
    /// Number of tails. Each counts as a block, because it holds a partial one.
    tails: usize,
    /// Number of calls so far that used blocks.
    clock: u64,
    blocks: HashMap<BlockKey, Entry>,
    /// Last use, index and key of each block, in the order of removal.
    order: BTreeSet<(u64, Reverse<usize>, BlockKey)>,
}

struct Entry {
    block: CacheBlock,
    /// Index of the block within its sequence.
    index: usize,
    /// The clock at its last use.
    used: u64,
    /// The ends of sequences whose last whole block this is. They are removed with it.
    tails: Vec<Tail>,
}

/// The end of a sequence.
struct Tail {
    /// The tokens after its last whole block, fewer than [`BLOCK`].
    tokens: Vec<u32>,
    /// The whole sequence.
    cache: SequenceCache,
}

impl PrefixCache {
    /// Returns an empty cache for up to `tokens_max` tokens.
    pub fn new(tokens_max: usize) -> Self {
        let blocks_max = tokens_max / BLOCK;
        Self { blocks_max, tails: 0, clock: 0, blocks: HashMap::new(), order: BTreeSet::new() }
    }

    /// Returns the number of tokens that the kept blocks have space for.
    pub fn tokens(&self) -> usize {
        (self.blocks.len() + self.tails) * BLOCK
    }

    /// Appends blocks to `cache`, up to the first one that is not kept, then the tail that follows them.
    /// `keys` has the keys of the sequence's blocks that may be reused, including those that `cache` already
    /// has; `tokens` are its tokens, of which the last is not reused. Returns the number of tokens appended.
    /// Does nothing if `cache` ends within a block.
    pub fn extend(&mut self, keys: &[BlockKey], tokens: &[u32], cache: &mut SequenceCache) -> usize {
        let before = cache.len();
        if !before.is_multiple_of(BLOCK) {
            return 0;
        }
        let first = before / BLOCK;
        if keys.get(first).is_some_and(|key| self.blocks.contains_key(key)) {
            self.clock += 1;
            for (index, key) in keys.iter().enumerate() {
                if !self.touch(key) && index >= first {
                    break;
                }
                if let Some(entry) = self.blocks.get(key).filter(|_| index >= first) {
                    cache.append_block(&entry.block);
                }
            }
        }
        if let Some(tail) = self.take_tail(keys, tokens, cache.len()) {
            *cache = tail;
        }
        cache.len() - before
    }

    /// Removes the longest tail that continues the first `len` tokens, and returns its sequence.
    fn take_tail(&mut self, keys: &[BlockKey], tokens: &[u32], len: usize) -> Option<SequenceCache> {
        let key = keys.get((len / BLOCK).checked_sub(1)?)?;
        let tails = &mut self.blocks.get_mut(key)?.tails;
        let (_, reusable) = tokens.get(len..)?.split_last()?;
        let fitting = tails.iter().enumerate().filter(|(_, tail)| reusable.starts_with(&tail.tokens));
        let (index, _) = fitting.max_by_key(|(_, tail)| tail.tokens.len())?;
        self.tails -= 1;
        Some(tails.swap_remove(index).cache)
    }

    /// Keeps the end of a sequence, if it ends within a block and the block before is kept. `keys` has the
    /// keys of its whole blocks, `tokens` its tokens; those beyond `cache` are ignored.
    pub fn keep_tail(&mut self, keys: &[BlockKey], tokens: &[u32], cache: &SequenceCache) {
        let (whole, len) = (cache.len() / BLOCK, cache.len());
        let Some(key) = whole.checked_sub(1).and_then(|last| keys.get(last)) else { return };
        let Some(entry) = self.blocks.get_mut(key) else { return };
        let tokens = &tokens[whole * BLOCK..len];
        if tokens.is_empty() || entry.tails.iter().any(|tail| tail.tokens == tokens) {
            return;
        }
        entry.tails.push(Tail { tokens: tokens.to_vec(), cache: cache.clone() });
        self.tails += 1;
        self.remove_oldest();
    }

    /// Keeps `blocks`. Their indices within the sequence begin at `first`, and `keys` has the keys of the
    /// sequence from its first block on.
    pub fn insert(&mut self, keys: &[BlockKey], first: usize, blocks: Vec<CacheBlock>) {
        self.clock += 1;
        for key in keys.iter().take(first) {
            self.touch(key);
        }
        for ((index, key), block) in keys.iter().enumerate().skip(first).zip(blocks) {
            if !self.touch(key) {
                self.blocks.insert(*key, Entry { block, index, used: self.clock, tails: vec![] });
                self.order.insert((self.clock, Reverse(index), *key));
            }
        }
        self.remove_oldest();
    }

    fn remove_oldest(&mut self) {
        while self.blocks.len() + self.tails > self.blocks_max
            && let Some((_, _, key)) = self.order.pop_first()
        {
            self.tails -= self.blocks.remove(&key).map_or(0, |entry| entry.tails.len());
        }
    }

    /// Marks a block as used now. Returns whether the block is kept.
    fn touch(&mut self, key: &BlockKey) -> bool {
        let Some(entry) = self.blocks.get_mut(key) else { return false };
        self.order.remove(&(entry.used, Reverse(entry.index), *key));
        entry.used = self.clock;
        self.order.insert((entry.used, Reverse(entry.index), *key));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(tokens: impl IntoIterator<Item = u32>) -> Vec<BlockKey> {
        let mut keys = vec![];
        extend_keys(&mut keys, 1, &tokens.into_iter().collect::<Vec<_>>());
        keys
    }

    /// Returns how many blocks of a prefix are kept. A cache without layers has no length, so the blocks are
    /// looked up.
    fn kept(cache: &PrefixCache, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| cache.blocks.contains_key(*key)).count()
    }

    fn insert(cache: &mut PrefixCache, keys: &[BlockKey]) {
        cache.insert(keys, 0, keys.iter().map(|_| CacheBlock::default()).collect());
    }

    #[test]
    fn a_key_stands_for_all_tokens_before_it() {
        let all = keys(0..100);
        assert_eq!(all.len(), 3, "whole blocks only");
        let mut grown = keys(0..40);
        let tokens: Vec<u32> = (0..100).collect();
        extend_keys(&mut grown, 1, &tokens);
        assert_eq!(grown, all, "in any number of calls");
        let mut of_another = vec![];
        extend_keys(&mut of_another, 2, &tokens);
        assert!(of_another.iter().all(|key| !all.contains(key)), "the version changes every key");
        let other = keys((0..100).map(|i| if i == 0 { 7 } else { i }));
        assert!(other.iter().all(|key| !all.contains(key)), "the first token changes every key");
        let tail = keys((0..100).map(|i| if i == 50 { 7 } else { i }));
        assert_eq!(tail[0], all[0]);
        assert_ne!(tail[1], all[1]);
    }

    #[test]
    fn the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() {
        let mut cache = PrefixCache::new(4 * BLOCK + 5);
        let (a, b) = (keys(0..64), keys(1000..1064));
        insert(&mut cache, &a);
        insert(&mut cache, &b);
        assert_eq!(cache.tokens(), 4 * BLOCK);
        // A longer sequence that begins like `a`: `b` loses its second block.
        let longer = keys(0..96);
        cache.insert(&longer, 2, vec![CacheBlock::default()]);
        assert_eq!((kept(&cache, &longer), kept(&cache, &b)), (3, 1));
        // More than fits: the beginning stays.
        let long = keys(5000..5000 + 32 * 9);
        insert(&mut cache, &long);
        assert_eq!((kept(&cache, &long), kept(&cache, &longer), kept(&cache, &b)), (4, 0, 0));
        assert_eq!(cache.order.len(), cache.blocks.len());
    }
}
