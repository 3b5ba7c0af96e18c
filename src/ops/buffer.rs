//! Fresh buffers of values: those that are written whole are not cleared first, which took a tenth of a tiny model's update.

/// Whether they begin with NaN, so that tests find who reads them unwritten: the ops' own, and all in a build with debug
/// assertions (`just unwritten`).
const NOT_A_NUMBER: bool =
    cfg!(any(test, debug_assertions)) || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// `len` values that the caller overwrites before it reads any.
pub fn buffer(len: usize) -> Vec<f32> {
    if NOT_A_NUMBER {
        return vec![f32::NAN; len];
    }
    let mut values: Vec<f32> = Vec::with_capacity(len);
    give_contents(values.as_mut_ptr());
    // SAFETY: so many were reserved, any bits are an f32, and memory that passed through `give_contents` has contents.
    unsafe { values.set_len(len) };
    values
}

/// `len` values to add to.
pub fn zeros(len: usize) -> Vec<f32> {
    vec![0.0; len]
}

/// Memory that was just allocated has no contents in Rust's eyes, and to read it is undefined. To the compiler this may write all
/// of it; it writes nothing, and what was there stays.
#[inline(always)]
fn give_contents(memory: *mut f32) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: no instruction is in it.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) memory, options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = memory;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_was_not_written_is_seen() {
        let buffer = buffer(1000);
        assert!(buffer.len() == 1000 && buffer.iter().all(|x| x.is_nan()));
        assert_eq!(zeros(3), [0.0; 3]);
    }
}
