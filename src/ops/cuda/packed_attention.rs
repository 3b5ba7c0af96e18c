//! Attention over packed sequences on the GPU: the op's forward and backward pass.

use super::arguments::tensor;
use super::launch::kernel_set;
use super::shared_keys::shared_key_gradients;
use super::sink_attention::{DeviceLaunchPlan, DeviceLse, Gradients, Inputs, OP};
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::plan::{LaunchSequences, check_attention};
use crate::ops::sink_attention::{Attention, KeySharing};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{DType, Result, Shape, Tensor};
use half::bf16;

/// Computes the forward pass of [`crate::ops::sink_attention()`]. `q` and `kv` are bf16, and `sinks` is f32.
pub(in crate::ops) fn sink_attention_forward(
    attention: &Attention,
    cu_seqlens: &[usize],
    [q, kv, sinks]: [DeviceArgument; 3],
) -> Result<(CudaStorage, Shape, DeviceLse)> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let sequences = LaunchSequences::for_packed_sequences(cu_seqlens)?;
    let tokens = sequences.tokens();
    check_attention(attention)?;
    OP.check("q", q, DType::BF16, &[tokens, heads, head_dim])?;
    OP.check("kv", kv, DType::BF16, &[tokens, 2, kv_heads, head_dim])?;
    OP.check("sinks", sinks, DType::F32, &[heads])?;
    let device = q.0.device();
    if tokens == 0 {
        let out = CudaStorage::wrap_cuda_slice(device.alloc_zeros::<bf16>(0)?, device.clone());
        return Ok((out, Shape::from((0, heads * head_dim)), device.alloc_zeros(0)?));
    }
    let prepared = DeviceLaunchPlan::new(device, kernel_set(device, head_dim)?, attention, &sequences, None)?;
    let mut outputs = prepared.outputs()?;
    let (q, kv, sinks) = (OP.view(q.0, q.1)?, OP.view(kv.0, kv.1)?, OP.view(sinks.0, sinks.1)?);
    prepared.forward(&Inputs { q: &q, kv: &kv, sinks: &sinks }, &mut outputs)?;
    let out = CudaStorage::wrap_cuda_slice(outputs.out, device.clone());
    Ok((out, Shape::from((tokens, heads * head_dim)), outputs.lse))
}

/// Returns the gradients of `q`, `kv` and `sinks`. The inputs are `q`, `kv`, `sinks`, the output of the
/// forward pass, and the gradient of the output. With `sharing`, the gradient of `kv` is the share of this
/// GPU.
pub(in crate::ops) fn sink_attention_backward(
    attention: &Attention,
    cu_seqlens: &[usize],
    lse: &DeviceLse,
    tensors: [&Tensor; 5],
    sharing: Option<&dyn KeySharing>,
) -> Result<[Tensor; 3]> {
    let Attention { heads, kv_heads, head_dim, .. } = *attention;
    let sequences = LaunchSequences::for_packed_sequences(cu_seqlens)?;
    let tokens = sequences.tokens();
    let opened = tensors.map(Tensor::storage_and_layout);
    let q = OP.gpu_storage("q", &opened[0], DType::BF16, &[tokens, heads, head_dim])?;
    let kv = OP.gpu_storage("kv", &opened[1], DType::BF16, &[tokens, 2, kv_heads, head_dim])?;
    let sinks = OP.gpu_storage("sinks", &opened[2], DType::F32, &[heads])?;
    let out = OP.gpu_storage("the output", &opened[3], DType::BF16, &[tokens, heads * head_dim])?;
    let dout =
        OP.gpu_storage("the output's gradient", &opened[4], DType::BF16, &[tokens, heads * head_dim])?;
    let device = q.0.device();
    if tokens == 0 {
        return Ok([
            tensor(device.alloc_zeros::<bf16>(0)?, device, tensors[0].shape()),
            tensor(device.alloc_zeros::<bf16>(0)?, device, tensors[1].shape()),
            tensor(device.alloc_zeros::<f32>(heads)?, device, tensors[2].shape()),
        ]);
    }
    let prepared = DeviceLaunchPlan::new(device, kernel_set(device, head_dim)?, attention, &sequences, None)?;
    let inputs = (OP.view(q.0, q.1)?, OP.view(kv.0, kv.1)?, OP.view(sinks.0, sinks.1)?);
    let inputs = Inputs { q: &inputs.0, kv: &inputs.1, sinks: &inputs.2 };
    let (out, dout_view) = (OP.view(out.0, out.1)?, OP.view(dout.0, dout.1)?);
    let gradients = match sharing {
        None => {
            let mut gradients = prepared.gradients()?;
            prepared.backward(&inputs, &out, lse, &dout_view, &mut gradients)?;
            gradients
        }
        Some(sharing) => {
            let mut gradients = prepared.gradients_with(device.alloc_zeros(prepared.key_value_count())?)?;
            prepared.query_gradients(&inputs, &out, lse, &dout_view, &mut gradients)?;
            let Gradients { delta, dkv, .. } = &mut gradients;
            shared_key_gradients(attention, &sequences, sharing, &inputs, [q, dout], [lse, delta], dkv)?;
            gradients
        }
    };
    let Gradients { dq, dkv, dsinks, .. } = gradients;
    Ok([
        tensor(dq, device, tensors[0].shape()),
        tensor(dkv, device, tensors[1].shape()),
        tensor(dsinks, device, tensors[2].shape()),
    ])
}
