//! KV-cache admission: decides which sequences may begin when the cache is limited.
//!
//! A slot is the cache space for one sequence of maximum length. The samples of a request form a group: they
//! share their prompt's slot until they decode. A group with `n` decoding samples takes `max(1, n)` slots. A
//! group without a decoding sample can therefore always start one, and no sample waits forever.

use std::collections::HashMap;

/// The slots of a cache and their use by groups.
#[derive(Default)]
pub(super) struct CacheAdmission {
    slots: usize,
    used: usize,
    /// Groups that have begun but not ended, by number.
    groups: HashMap<u64, Group>,
}

/// A group that has begun but not ended.
#[derive(Clone, Copy, Default)]
struct Group {
    /// Number of samples that do not decode yet.
    waiting: usize,
    /// Number of decoding samples.
    decoding: usize,
}

impl Group {
    fn slots(self) -> usize {
        if self.waiting + self.decoding == 0 { 0 } else { self.decoding.max(1) }
    }
}

impl CacheAdmission {
    /// Returns the admission for a cache with `slots` slots. All are free.
    pub fn new(slots: usize) -> Self {
        Self { slots, used: 0, groups: HashMap::new() }
    }

    /// Returns true when another group may begin.
    pub fn has_free_slot(&self) -> bool {
        self.used < self.slots
    }

    /// Takes a slot for the prompt of group `number`, which has `samples` samples.
    pub fn begin_group(&mut self, number: u64, samples: usize) {
        self.change(number, |group| group.waiting = samples);
    }

    /// Returns true when a sample of group `number` may begin to decode.
    pub fn can_begin_sample(&self, number: u64) -> bool {
        self.groups.get(&number).is_none_or(|group| group.decoding == 0) || self.has_free_slot()
    }

    /// Records that a sample of the group begins to decode.
    pub fn begin_sample(&mut self, number: u64) {
        self.change(number, |group| {
            (group.waiting, group.decoding) = (group.waiting - 1, group.decoding + 1)
        });
    }

    /// Records the end of a sample of the group; `has_decoded` tells whether it decoded.
    pub fn end_sample(&mut self, number: u64, has_decoded: bool) {
        self.change(number, |group| if has_decoded { group.decoding -= 1 } else { group.waiting -= 1 });
    }

    fn change(&mut self, number: u64, change: impl FnOnce(&mut Group)) {
        let group = self.groups.entry(number).or_default();
        self.used -= group.slots();
        change(group);
        self.used += group.slots();
        if group.waiting + group.decoding == 0 {
            self.groups.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cache::CacheCapacity;
    use crate::model::config::{Config, LayerType, Rope};
    use crate::model::families::Family;
    use crate::ops::page_allocator::{PageAllocator, PagedSequence};
    use crate::random::{Purpose, stream};
    use rand::Rng;

    fn tiny() -> Config {
        Config {
            family: Family::default(),
            vocab_size: 10,
            hidden_size: 8,
            num_hidden_layers: 2,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 64,
            intermediate_size: 8,
            num_local_experts: 1,
            num_experts_per_tok: 1,
            sliding_window: 0,
            layer_types: LayerType::alternate(2),
            rope: Rope { theta: 1e4, yarn: None },
            rms_norm_eps: 1e-5,
            swiglu_limit: 7.0,
            tie_word_embeddings: false,
            max_position_embeddings: 1000,
            bos_token_id: None,
            eos_token_ids: vec![],
            pad_token_id: None,
        }
    }

    #[test]
    fn a_group_takes_a_place_for_its_prompt_and_each_sample_under_way() {
        let mut admission = CacheAdmission::new(3);
        admission.begin_group(0, 2);
        assert!(admission.can_begin_sample(0));
        admission.begin_sample(0);
        assert!(admission.can_begin_sample(0), "the first sample takes the prompt's slot");
        admission.begin_sample(0);
        assert!(admission.has_free_slot());
        admission.begin_group(1, 2);
        assert!(!admission.has_free_slot());
        assert!(admission.can_begin_sample(1), "its first sample takes its prompt's slot");
        admission.begin_sample(1);
        assert!(!admission.can_begin_sample(1), "a second one waits");
        admission.end_sample(0, true);
        assert!(admission.can_begin_sample(1));
        admission.begin_sample(1);
        assert!(!admission.has_free_slot());
        // A sample that ends before it decodes has no slot of its own. The last sample of the group frees the
        // prompt's slot.
        admission.end_sample(0, true);
        admission.begin_group(2, 2);
        admission.end_sample(2, false);
        assert!(!admission.has_free_slot());
        admission.end_sample(2, false);
        assert!(admission.has_free_slot());
    }

    #[test]
    fn with_one_place_everything_ends_one_after_the_other() {
        let mut admission = CacheAdmission::new(1);
        for group in 0..2 {
            assert!(admission.has_free_slot());
            admission.begin_group(group, 3);
            for _ in 0..3 {
                assert!(admission.can_begin_sample(group));
                admission.begin_sample(group);
                assert!(!admission.can_begin_sample(group) && !admission.has_free_slot());
                admission.end_sample(group, true);
            }
        }
        assert!(admission.has_free_slot());
    }

    /// Regression test: waiting samples still held prompt pages that decoding samples had freed. So the pages
    /// ran out.
    #[test]
    fn whoever_begins_finds_the_pages_it_needs() {
        let config = Config { sliding_window: 100, ..tiny() };
        let (prompt_max, response_max) = (300, 400);
        for (seed, slots) in (0..24).zip([1, 2, 3, 5, 8, 13].into_iter().cycle()) {
            let mut random = stream(seed, Purpose::Sampling, &[]);
            let admission =
                CacheCapacity { sequences: slots, tokens: prompt_max + response_max, fed_tokens_max: 64 };
            let pools = [LayerType::Full, LayerType::Sliding]
                .map(|layer| (layer, PageAllocator::new(admission.pages(&config, &layer))));
            let (groups, samples) = (12, 4);
            let mut waits: Vec<u64> = (0..groups).collect();
            let mut used = CacheAdmission::new(slots);
            // For each active sample: its group, whether it decodes, its pages per layer, and its remaining
            // tokens.
            let mut under_way: Vec<(u64, bool, [PagedSequence; 2], usize)> = vec![];
            let feed = |sequence: &mut [PagedSequence; 2], mut count: usize| {
                while count > 0 {
                    let now = count.min(admission.fed_tokens_max);
                    for ((layer, pool), pages) in pools.iter().zip(sequence.iter_mut()) {
                        pool.extend(&mut [&mut *pages], &[now]).unwrap();
                        if *layer == LayerType::Sliding {
                            pages.forget_before(pages.len(), config.sliding_window);
                        }
                    }
                    count -= now;
                }
            };
            while !waits.is_empty() || !under_way.is_empty() {
                if let Some(group) = waits.pop_if(|_| used.has_free_slot()) {
                    used.begin_group(group, samples);
                    let mut prompt: [PagedSequence; 2] = Default::default();
                    feed(&mut prompt, random.random_range(1..=prompt_max));
                    let sample = |_| (group, false, prompt.clone(), random.random_range(1..=response_max));
                    under_way.extend((0..samples).map(sample).collect::<Vec<_>>());
                }
                let before = under_way.len();
                let mut index = 0;
                let mut moved = false;
                while index < under_way.len() {
                    let (group, has_decoded, sequence, left) = &mut under_way[index];
                    if !*has_decoded && used.can_begin_sample(*group) {
                        used.begin_sample(*group);
                        *has_decoded = true;
                    }
                    if *has_decoded {
                        let now = random.random_range(1..=64.min(*left));
                        feed(sequence, now);
                        *left -= now;
                        moved = true;
                    }
                    if *left == 0 {
                        used.end_sample(*group, true);
                        under_way.swap_remove(index);
                    } else {
                        index += 1;
                    }
                }
                assert!(moved || before == 0, "all wait");
            }
            assert!(used.has_free_slot());
        }
    }
}
