//! KV-cache admission: decides which conversations may begin when the cache is limited.
//!
//! A slot is the cache for one sequence of maximum length. The samples of a group share the slot of their
//! prompt until they decode. A group with `n` decoding samples uses `max(1, n)` slots. So a group without a
//! decoding sample can always start one, and no sample waits forever.

/// The slots of a cache, and how many of them each group uses.
pub(super) struct CacheAdmission {
    slots: usize,
    used: usize,
    samples: usize,
    groups: Vec<Group>,
}

/// A group that has begun and has not ended.
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
    /// Creates `slots` free slots for `groups` groups of `samples` samples each.
    pub fn new(slots: usize, groups: usize, samples: usize) -> Self {
        Self { slots, used: 0, samples, groups: vec![Group::default(); groups] }
    }

    /// Returns whether another group may begin.
    pub fn has_free_slot(&self) -> bool {
        self.used < self.slots
    }

    /// Assigns a slot to the prompt of a group.
    pub fn begin_group(&mut self, index: usize) {
        let waiting = self.samples;
        self.change(index, |group| group.waiting = waiting);
    }

    /// Returns whether a sample of group `index` may begin to decode.
    pub fn can_begin_sample(&self, index: usize) -> bool {
        self.groups[index].decoding == 0 || self.has_free_slot()
    }

    /// Records that a sample of the group begins to decode.
    pub fn begin_sample(&mut self, index: usize) {
        self.change(index, |group| (group.waiting, group.decoding) = (group.waiting - 1, group.decoding + 1));
    }

    /// Records the end of a sample of the group. `has_decoded` says whether the sample had begun to decode.
    pub fn end_sample(&mut self, index: usize, has_decoded: bool) {
        self.change(index, |group| if has_decoded { group.decoding -= 1 } else { group.waiting -= 1 });
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Group)) {
        let group = &mut self.groups[index];
        self.used -= group.slots();
        change(group);
        self.used += group.slots();
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
        let mut admission = CacheAdmission::new(3, 3, 2);
        admission.begin_group(0);
        assert!(admission.can_begin_sample(0));
        admission.begin_sample(0);
        assert!(admission.can_begin_sample(0), "the first sample uses the prompt's slot");
        admission.begin_sample(0);
        assert!(admission.has_free_slot());
        admission.begin_group(1);
        assert!(!admission.has_free_slot());
        assert!(admission.can_begin_sample(1), "its first sample uses its prompt's slot");
        admission.begin_sample(1);
        assert!(!admission.can_begin_sample(1), "a second sample waits");
        admission.end_sample(0, true);
        assert!(admission.can_begin_sample(1));
        admission.begin_sample(1);
        assert!(!admission.has_free_slot());
        // A sample that ends before it decodes has no slot of its own. The last sample of the group frees the
        // slot.
        admission.end_sample(0, true);
        admission.begin_group(2);
        admission.end_sample(2, false);
        assert!(!admission.has_free_slot());
        admission.end_sample(2, false);
        assert!(admission.has_free_slot());
    }

    #[test]
    fn with_one_place_everything_ends_one_after_the_other() {
        let mut admission = CacheAdmission::new(1, 2, 3);
        for group in 0..2 {
            assert!(admission.has_free_slot());
            admission.begin_group(group);
            for _ in 0..3 {
                assert!(admission.can_begin_sample(group));
                admission.begin_sample(group);
                assert!(!admission.can_begin_sample(group) && !admission.has_free_slot());
                admission.end_sample(group, true);
            }
        }
        assert!(admission.has_free_slot());
    }

    /// Regression test: waiting samples held prompt pages that other samples had freed, and no page was left.
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
            let mut waits: Vec<usize> = (0..groups).collect();
            let mut used = CacheAdmission::new(slots, groups, samples);
            // For each active sample: its group, whether it decodes, its pages per layer, and its remaining
            // tokens.
            let mut under_way: Vec<(usize, bool, [PagedSequence; 2], usize)> = vec![];
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
                    used.begin_group(group);
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
