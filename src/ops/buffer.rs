//! Fresh buffers of values. Buffers that are overwritten whole are not cleared first; clearing took a tenth
//! of a tiny model's update.

/// True when fresh buffers hold NaN, so that tests find reads of unwritten values. True in tests, in builds
/// with debug assertions (`just unwritten`), and on architectures other than x86-64 and AArch64.
const NOT_A_NUMBER: bool =
    cfg!(any(test, debug_assertions)) || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Returns `len` values that the caller overwrites before it reads any.
pub fn buffer(len: usize) -> Vec<f32> {
    if NOT_A_NUMBER {
        return vec![f32::NAN; len];
    }
    let mut values: Vec<f32> = Vec::with_capacity(len);
    give_contents(values.as_mut_ptr());
    // SAFETY: `len` values are reserved, every bit pattern is an f32, and `give_contents` makes the memory
    // initialized.
    unsafe { values.set_len(len) };
    values
}

/// Returns `len` zeros.
pub fn zeros(len: usize) -> Vec<f32> {
    vec![0.0; len]
}

/// Makes freshly allocated memory count as initialized. Reading uninitialized memory is undefined behaviour
/// in Rust. To the compiler this call may write all of the memory; it writes nothing.
#[inline(always)]
fn give_contents(memory: *mut f32) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: the assembly has no instruction.
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
