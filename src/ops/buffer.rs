//! New buffers of values. Buffers that the caller overwrites completely are not cleared first. Clearing took
//! 10% of the time of a tiny model's update.

/// Whether new buffers are filled with NaN, so that tests find reads of unwritten values. True in tests, in
/// builds with debug assertions (`just unwritten`), and on architectures other than x86-64 and AArch64.
const FILLS_WITH_NAN: bool =
    cfg!(any(test, debug_assertions)) || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// Returns `len` unspecified values. The caller must overwrite every value before it reads any.
pub fn buffer(len: usize) -> Vec<f32> {
    unspecified(len, f32::NAN)
}

/// Returns `len` unspecified bytes. The caller must overwrite every byte before it reads any.
pub fn byte_buffer(len: usize) -> Vec<u8> {
    unspecified(len, 0xff)
}

/// Returns `len` unspecified values. If [`FILLS_WITH_NAN`] is true, each value is `unwritten`.
#[inline(always)]
fn unspecified<T: bytemuck::Pod>(len: usize, unwritten: T) -> Vec<T> {
    if FILLS_WITH_NAN {
        return vec![unwritten; len];
    }
    let mut values: Vec<T> = Vec::with_capacity(len);
    assume_initialized(values.as_mut_ptr());
    // SAFETY: `len` values are reserved, every bit pattern is a valid `T`, and `assume_initialized` makes the
    // memory initialized.
    unsafe { values.set_len(len) };
    values
}

/// Returns `len` zeros.
pub fn zeros(len: usize) -> Vec<f32> {
    vec![0.0; len]
}

/// Makes newly allocated memory count as initialized, without writing to it. Reads of uninitialized memory
/// are undefined behaviour in Rust. Here they are defined, because the compiler must assume that the assembly
/// writes all of the memory.
#[inline(always)]
fn assume_initialized<T>(memory: *mut T) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: the assembly has no instructions.
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
