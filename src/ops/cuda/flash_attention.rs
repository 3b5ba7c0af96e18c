//! FlashAttention-2, which has no sinks. It shows the effect of a framework that leaves the sinks out, and
//! has only a forward pass.

use crate::ops::sink_attention::Attention;
use candle_core::{Result, Tensor, bail};

/// Computes causal attention by FlashAttention-2 **without sinks**. Shapes are those of
/// [`crate::ops::sink_attention()`]. The op has no backward pass, so differentiating it is an error.
///
/// # Errors
/// When `attention` has sinks, because the library would silently ignore them. Errors of the library.
pub fn fa2_without_sinks(
    q: &Tensor,
    kv: &Tensor,
    cu_seqlens: &[usize],
    attention: &Attention,
) -> Result<Tensor> {
    if attention.sinks {
        bail!("FlashAttention-2 has no sinks; call it with sinks: false, or call sink_attention");
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
        // The window of FlashAttention-2 does not include the key of the query itself.
        attention.window.map(|w| w - 1),
        Some(0),
    )?;
    out.reshape((tokens, heads * head_dim))
}
