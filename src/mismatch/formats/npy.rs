//! NumPy's `.npy` in base64, the format of vLLM's routed experts.

use super::RawRoutedExperts;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;

/// Decodes base64 `text`.
pub(super) fn base64_bytes(text: &str) -> Result<Vec<u8>, String> {
    BASE64_STANDARD.decode(text.trim()).map_err(|e| format!("routed_experts is not base64: {e}"))
}

/// Reads an array of small unsigned integers with three axes.
pub(super) fn read_routed_experts(text: &str) -> Result<RawRoutedExperts, String> {
    let bytes = base64_bytes(text)?;
    let format_error = || "routed_experts is not a .npy array of small integers with three axes".to_owned();
    if bytes.len() < 10 || bytes[..6] != *b"\x93NUMPY" {
        return Err(format_error());
    }
    // In version 1 the header length has 2 bytes, in later versions 4 bytes.
    let (length, start) = match bytes[6] {
        1 => (usize::from(u16::from_le_bytes([bytes[8], bytes[9]])), 10usize),
        _ => {
            let four = bytes.get(8..12).ok_or_else(format_error)?;
            (u32::from_le_bytes([four[0], four[1], four[2], four[3]]) as usize, 12)
        }
    };
    let header = bytes.get(start..start.saturating_add(length)).ok_or_else(format_error)?;
    let header = String::from_utf8_lossy(header);
    if header.contains("True") {
        return Err("routed_experts is in Fortran order; write it in C order".into());
    }
    let text_after_key = |key: &str| {
        header.split_once(key).map(|(_, rest)| rest.trim_start_matches([':', ' ', '\'', '('].as_slice()))
    };
    let width = match text_after_key("'descr'").ok_or_else(format_error)?.get(..3) {
        Some("|u1") => 1,
        Some("<u2" | "<i2") => 2,
        Some("<i4" | "<u4") => 4,
        _ => return Err(format_error()),
    };
    let shape = text_after_key("'shape'").and_then(|rest| rest.split(')').next()).ok_or_else(format_error)?;
    let axes: Vec<usize> = shape.split(',').filter_map(|axis| axis.trim().parse().ok()).collect();
    let shape: [usize; 3] = axes.try_into().map_err(|_| format_error())?;
    let values = &bytes[start + length..];
    let count =
        shape.iter().try_fold(1usize, |product, axis| product.checked_mul(*axis)).ok_or_else(format_error)?;
    if Some(values.len()) != count.checked_mul(width) {
        return Err(format_error());
    }
    let value = |b: &[u8]| b.iter().rev().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte));
    Ok(RawRoutedExperts { experts: values.chunks_exact(width).map(value).collect(), shape: Some(shape) })
}
