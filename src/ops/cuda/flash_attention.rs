//! FlashAttention-2 without sinks, for the ablation "FA2 without the fix". Forward only.

use crate::ops::sink_attention::Attention;
use candle_core::{Result, Tensor, bail};

/// Computes causal attention by FlashAttention-2 **without sinks**; shapes as in
/// [`crate::ops::sink_attention()`]. It has no backward: differentiating it is an error.
///
/// # Errors
/// When `attention` has sinks, which the library would ignore silently; those of the library.
pub fn fa2_without_sinks(
    q: &Tensor,
    kv: &Tensor,
    cu_seqlens: &[usize],
    attention: &Attention,
) -> Result<Tensor> {
    if attention.sinks {
        bail!(
            "FlashAttention-2 has no sinks; ask for attention without them (sinks: false), or for sink_attention"
        );
    }
    let (tokens, heads, head_dim) = q.dims3()?;
    let longest = cu_seqlens.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
    let bounds: Vec<u32> = cu_seqlens.iter().map(|&x| x as u32).collect();
    let bounds = Tensor::new(bounds, q.device())?;
    let (k, v) = (kv.narrow(1, 0, 1)?.squeeze(1)?, kv.narrow(1, 1, 1)?.squeeze(1)?);
    let out = candle_flash_attn::flash_attn_varlen_windowed(
        q,
        &k,
        &v,
        &bounds,
        &bounds,
        longest,
        longest,
        attention.scale(),
        // Its window does not count the query itself.
        attention.window.map(|w| w - 1),
        Some(0),
    )?;
    out.reshape((tokens, heads * head_dim))
}
