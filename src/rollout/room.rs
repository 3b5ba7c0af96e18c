//! Room for keys and values, where there is only so much of it: which conversations may begin.
//!
//! A place is what one sequence takes at its longest. The samples of a group share the place of their prompt until they decode: a
//! group with `n` samples under way takes `max(1, n)` places, so that one more sample of a group of which none is under way
//! always fits, and nothing waits for ever.

/// Places, and who has them.
pub(super) struct Room {
    places: usize,
    taken: usize,
    samples: usize,
    groups: Vec<Group>,
}

/// A group that has begun and not ended.
#[derive(Clone, Copy, Default)]
struct Group {
    /// Samples that have not begun to decode.
    waiting: usize,
    /// Samples under way.
    begun: usize,
}

impl Group {
    fn places(self) -> usize {
        if self.waiting + self.begun == 0 { 0 } else { self.begun.max(1) }
    }
}

impl Room {
    /// `places` for `groups` groups of `samples` each.
    pub fn new(places: usize, groups: usize, samples: usize) -> Self {
        Self { places, taken: 0, samples, groups: vec![Group::default(); groups] }
    }

    /// Whether another group may begin.
    pub fn has_place(&self) -> bool {
        self.taken < self.places
    }

    /// Takes the place of a group's prompt.
    pub fn begin_group(&mut self, index: usize) {
        let waiting = self.samples;
        self.change(index, |group| group.waiting = waiting);
    }

    /// Whether a sample of group `index` may begin to decode.
    pub fn fits(&self, index: usize) -> bool {
        self.groups[index].begun == 0 || self.has_place()
    }

    /// A sample of the group begins to decode.
    pub fn begin_sample(&mut self, index: usize) {
        self.change(index, |group| (group.waiting, group.begun) = (group.waiting - 1, group.begun + 1));
    }

    /// A sample of the group has ended, which had `begun` to decode.
    pub fn end_sample(&mut self, index: usize, begun: bool) {
        self.change(index, |group| if begun { group.begun -= 1 } else { group.waiting -= 1 });
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Group)) {
        let group = &mut self.groups[index];
        self.taken -= group.places();
        change(group);
        self.taken += group.places();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_takes_a_place_for_its_prompt_and_each_sample_under_way() {
        let mut room = Room::new(3, 3, 2);
        room.begin_group(0);
        assert!(room.fits(0));
        room.begin_sample(0);
        assert!(room.fits(0), "the prompt's place is the first sample's");
        room.begin_sample(0);
        assert!(room.has_place());
        room.begin_group(1);
        assert!(!room.has_place());
        assert!(room.fits(1), "its first sample has its prompt's place");
        room.begin_sample(1);
        assert!(!room.fits(1), "a second one waits");
        room.end_sample(0, true);
        assert!(room.fits(1));
        room.begin_sample(1);
        assert!(!room.has_place());
        // One that ended before it decoded had no place of its own; the group's last one leaves.
        room.end_sample(0, true);
        room.begin_group(2);
        room.end_sample(2, false);
        assert!(!room.has_place());
        room.end_sample(2, false);
        assert!(room.has_place());
    }

    #[test]
    fn with_one_place_everything_ends_one_after_the_other() {
        let mut room = Room::new(1, 2, 3);
        for group in 0..2 {
            assert!(room.has_place());
            room.begin_group(group);
            for _ in 0..3 {
                assert!(room.fits(group));
                room.begin_sample(group);
                assert!(!room.fits(group) && !room.has_place());
                room.end_sample(group, true);
            }
        }
        assert!(room.has_place());
    }
}
