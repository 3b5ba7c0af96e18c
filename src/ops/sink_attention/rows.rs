//! Output rows that tasks of different heads write in parallel.

/// A buffer to which tasks of different key-value heads write at disjoint indices.
pub(super) struct Rows<'a> {
    start: *mut f32,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: each task writes only the columns of its own heads, and no other task writes these columns.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    pub(super) fn new(values: &'a mut [f32]) -> Self {
        Self { start: values.as_mut_ptr(), len: values.len(), lifetime: std::marker::PhantomData }
    }

    /// Returns the part `offset..offset + len`.
    pub(super) fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "attention output out of bounds");
        // SAFETY: the assertion checked the bounds.
        Self { start: unsafe { self.start.add(offset) }, len, lifetime: self.lifetime }
    }

    /// Returns the `width` values from `offset` on.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(super) fn at(&self, offset: usize, width: usize) -> &mut [f32] {
        assert!(offset + width <= self.len, "attention output out of bounds");
        // SAFETY: the assertion checked the bounds. The ranges of different tasks are disjoint, as the
        // documentation of the type requires.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn tasks_write_their_own_columns_and_none_writes_outside() {
        let (heads, width) = (3, 2);
        let mut values = vec![0f32; 4 * heads * width];
        let rows = Rows::new(&mut values);
        (0..heads).into_par_iter().for_each(|head| {
            let part = rows.slice(head * width, 3 * heads * width + width);
            (0..4).for_each(|row| part.at(row * heads * width, width).fill((row * heads + head) as f32));
        });
        let expected: Vec<f32> = (0..4 * heads).flat_map(|value| [value as f32; 2]).collect();
        assert_eq!(values, expected);
        let outside = std::panic::catch_unwind(move || Rows::new(&mut values).at(4 * 3 * 2 - 1, 2).fill(1.0));
        assert!(outside.is_err());
    }
}
