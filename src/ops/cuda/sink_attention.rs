//! Attention with sinks on the GPU: argument checks, launch plans and launches. No function waits for a
//! kernel.

use super::arguments::{Op, output};
use super::launch::{Addresses, launch};
use crate::ops::sink_attention::kernels::{
    BLOCK_KEYS, DELTA_ROWS, KernelSet, PART_SUMS, SinkAttentionParams, Tile,
};
use crate::ops::sink_attention::plan::{LaunchSequences, check_attention, padded_chunks};
use crate::ops::sink_attention::{Attention, NO_SINK};
use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::{Result, bail};
use half::bf16;

// SAFETY: the struct has only numbers and is `#[repr(C)]`. A test compares every field with the struct of the
// header.
unsafe impl DeviceRepr for SinkAttentionParams {}

pub(super) const OP: Op = Op("sink_attention");

/// Log-sum-exps `[T, N]` of the forward pass, which the backward pass uses.
pub type DeviceLse = CudaSlice<f32>;

/// The inputs of attention. A row of keys and values is `[2, M, D]`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    /// `[T, N, D]`.
    pub q: &'a CudaView<'a, bf16>,
    /// `[T, 2, M, D]`, or `[pages · 64, 2, M, D]` for a cache.
    pub kv: &'a CudaView<'a, bf16>,
    /// `[N]`.
    pub sinks: &'a CudaView<'a, f32>,
}

/// The outputs of the forward pass.
pub struct Outputs {
    /// `[T, N, D]`.
    pub out: CudaSlice<bf16>,
    /// `[T, N]`.
    pub lse: DeviceLse,
}

/// The outputs of the backward pass.
pub struct Gradients {
    /// `[T, N]`. One kernel of the backward pass writes these values, and the next reads them.
    pub(super) delta: CudaSlice<f32>,
    /// `[T, N, D]`.
    pub dq: CudaSlice<bf16>,
    /// `[T, 2, M, D]`.
    pub dkv: CudaSlice<bf16>,
    /// `[N]`.
    pub dsinks: CudaSlice<f32>,
}

/// The sizes of a launch. Launches of one shape differ only in the contents of their arrays, and can use the
/// same captured graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaunchShape {
    pub tokens: usize,
    query_tiles: usize,
    chunk_tiles: usize,
    key_tiles: usize,
    /// Number of parts of a split forward pass: tokens × chunks of keys, summed over sequences.
    parts: usize,
    /// Whether the forward pass runs one block per chunk of keys and merges the chunks. The bits do not
    /// depend on this choice.
    spread: bool,
    /// The width of the page table; `None` if keys are not in a cache.
    pages_max: Option<usize>,
}

/// A launch plan without its arrays. The caller owns the memory of the arrays.
#[derive(Clone, Copy)]
pub(super) struct LaunchPlan {
    kernels: &'static KernelSet,
    attention: Attention,
    pub shape: LaunchShape,
    /// The start of each array, in elements. The arrays are query bounds, key bounds, query tiles, key tiles,
    /// chunk tiles and part starts.
    starts: [usize; 6],
}

/// The arrays of a launch on the device.
#[derive(Clone, Copy)]
pub(super) struct LaunchArrays<'a> {
    /// The arrays of a plan, concatenated.
    pub plan: &'a CudaSlice<i32>,
    /// `[sequences, pages_max]`; `None` if keys are not in a cache.
    pub page_table: Option<&'a CudaSlice<i32>>,
}

/// A launch plan with its arrays on the device. Any number of layers and passes can use it.
pub struct DeviceLaunchPlan {
    device: CudaDevice,
    plan: LaunchPlan,
    /// The arrays of the plan, concatenated.
    arrays: CudaSlice<i32>,
    page_table: Option<CudaSlice<i32>>,
    /// Sinks that have no effect, for attention without sinks: the kernel always takes sinks.
    no_sinks: Option<CudaSlice<f32>>,
}

/// Whether a launch splits the keys of a query into chunks that run in parallel.
#[derive(Clone, Copy)]
pub(super) enum SplitKv {
    /// Splits if the flag is true.
    Exactly(bool),
    /// Splits as [`LaunchSequences::should_split_decode`] decides. Arrays and sizes change as seldom as
    /// possible while sequences grow: the last chunk tile is repeated, [`padded_chunks`] tiles in all.
    Decode,
}

impl LaunchPlan {
    /// Returns the launch plan for `kernels`, and the contents of its arrays. `pages` is the number of
    /// entries of a page table and its width, if keys are in a cache.
    ///
    /// # Errors
    /// When the kernels do not support these sizes, or a page table is too small.
    pub(super) fn new(
        kernels: &'static KernelSet,
        attention: &Attention,
        sequences: &LaunchSequences,
        pages: Option<(usize, usize)>,
        spread: SplitKv,
    ) -> Result<(Self, Vec<i32>)> {
        check_attention(attention)?;
        if kernels.head_dim != attention.head_dim {
            bail!("sink_attention: kernels for heads of {} for {attention:?}", kernels.head_dim);
        }
        sequences.check_rows(attention)?;
        if let Some((entries, pages_max)) = pages {
            sequences.check_page_table(entries, pages_max)?;
        }
        let tokens = sequences.tokens();
        if tokens == 0 {
            bail!("sink_attention: no sequence has a token; omit the call");
        }
        let (is_spread, query_tiles) = match spread {
            SplitKv::Exactly(is_spread) => (is_spread, sequences.query_tiles(attention)),
            SplitKv::Decode => (sequences.should_split_decode(attention), sequences.decode_tiles(attention)),
        };
        let padded = |count| if matches!(spread, SplitKv::Decode) { padded_chunks(count) } else { count };
        // Keys in a cache have no gradients.
        let key_tiles =
            if pages.is_some() { vec![] } else { sequences.key_tiles(attention, kernels.dkv_keys) };
        // Only a split forward pass reads chunk tiles.
        let mut chunk_tiles = if is_spread { sequences.chunk_tiles(attention) } else { vec![] };
        if let Some(&last) = chunk_tiles.last() {
            // A repeated block computes and writes the same numbers again.
            chunk_tiles.resize(padded(chunk_tiles.len()), last);
        }
        let part_starts = if is_spread { sequences.part_starts() } else { vec![0] };
        let flat = |tiles: &[Tile]| tiles.iter().flat_map(|t| [t.sequence, t.first]).collect::<Vec<_>>();
        let mut arrays: Vec<i32> = vec![];
        let mut starts = [0; 6];
        let parts = [
            sequences.query_bounds(),
            sequences.key_bounds(),
            flat(&query_tiles),
            flat(&key_tiles),
            chunk_tiles.iter().flat_map(|t| [t.tile.sequence, t.tile.first, t.chunk]).collect(),
            part_starts.clone(),
        ];
        for (start, part) in starts.iter_mut().zip(parts) {
            *start = arrays.len();
            arrays.extend(part);
        }
        let shape = LaunchShape {
            tokens,
            query_tiles: query_tiles.len(),
            chunk_tiles: chunk_tiles.len(),
            parts: part_starts.last().map_or(0, |&parts| padded(parts as usize)),
            spread: is_spread,
            key_tiles: key_tiles.len(),
            pages_max: pages.map(|(_, pages_max)| pages_max),
        };
        Ok((Self { kernels, attention: *attention, shape, starts }, arrays))
    }

    /// Keeps every `ranks`-th key tile, from tile `index` on. Tiles are in descending order of work, so all
    /// shares have about the same work.
    fn keep_key_tiles(&mut self, arrays: &mut [i32], (index, ranks): (usize, usize)) {
        let tiles = &mut arrays[self.starts[3]..][..2 * self.shape.key_tiles];
        let kept = (index..self.shape.key_tiles).step_by(ranks);
        self.shape.key_tiles = kept.len();
        for (place, tile) in kept.enumerate() {
            tiles.copy_within(2 * tile..2 * tile + 2, 2 * place);
        }
    }

    /// Allocates the outputs of [`LaunchPlan::forward`].
    ///
    /// # Errors
    /// When the device has too little memory.
    pub(super) fn outputs(&self, device: &CudaDevice) -> Result<Outputs> {
        let rows = self.shape.tokens * self.attention.heads;
        Ok(Outputs { out: output(device, rows * self.attention.head_dim)?, lse: output(device, rows)? })
    }

    /// Returns the parameters that all launches share: sizes, inputs and sequences.
    fn params<'a>(
        &self,
        arrays: &LaunchArrays<'a>,
        inputs: &Inputs<'a>,
        at: &mut Addresses<'_, 'a>,
    ) -> SinkAttentionParams {
        let Attention { heads, kv_heads, head_dim, window, .. } = self.attention;
        let LaunchShape { tokens, pages_max, .. } = self.shape;
        let plan = at.read(arrays.plan);
        let array = |i: usize| plan + 4 * self.starts[i] as u64;
        let kv = at.read(inputs.kv);
        // A window that does not fit 32 bits masks no key, so it is passed as 0, which means no window.
        let window = window.and_then(|w| i32::try_from(w).ok()).unwrap_or(0);
        SinkAttentionParams {
            q: at.read(inputs.q),
            k: kv,
            v: kv + 2 * (kv_heads * head_dim) as u64,
            sinks: at.read(inputs.sinks),
            cu_seqlens_q: array(0),
            cu_seqlens_k: array(1),
            page_table: arrays.page_table.map_or(0, |table| at.read(table)),
            tiles: array(2),
            chunk_tiles: array(4),
            part_starts: array(5),
            tokens: tokens as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            kv_token_stride: (2 * kv_heads * head_dim) as i32,
            kv_head_stride: head_dim as i32,
            pages_max: pages_max.unwrap_or(0) as i32,
            window,
            scale: self.attention.scale(),
            scale_log2: self.attention.scale() * std::f32::consts::LOG2_E,
            ..SinkAttentionParams::default()
        }
    }

    /// Checks that the inputs have all elements that the kernels read. This is the last check before a
    /// launch.
    fn check_inputs(&self, inputs: &Inputs) -> Result<()> {
        let Attention { heads, kv_heads, head_dim, .. } = self.attention;
        let LaunchShape { tokens, pages_max, .. } = self.shape;
        let kv_row = 2 * kv_heads * head_dim;
        let kv_enough = pages_max.is_some() || inputs.kv.len() == tokens * kv_row;
        if inputs.q.len() != tokens * heads * head_dim
            || !kv_enough
            || inputs.kv.len() % (BLOCK_KEYS * kv_row) != 0 && pages_max.is_some()
            || inputs.sinks.len() != heads
        {
            bail!(
                "sink_attention: q with {}, keys and values with {} and sinks with {} elements do not fit {tokens} tokens of {:?}",
                inputs.q.len(),
                inputs.kv.len(),
                inputs.sinks.len(),
                self.attention
            );
        }
        Ok(())
    }

    /// Launches the forward pass. `arrays` belong to this plan or to another plan of the same shape. The page
    /// table has the size that the plan was made for.
    ///
    /// # Errors
    /// When sizes disagree, or the driver fails.
    pub(super) fn forward(
        &self,
        device: &CudaDevice,
        arrays: &LaunchArrays,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<()> {
        self.check_inputs(inputs)?;
        let Attention { heads, kv_heads, head_dim, .. } = self.attention;
        let LaunchShape { query_tiles, chunk_tiles, parts, spread, .. } = self.shape;
        let KernelSet { forward, chunk, merge, .. } = self.kernels;
        let blocks = query_tiles * kv_heads;
        let Outputs { out, lse } = outputs;
        // SAFETY: every address points to memory that outlives the launch and has the size in the header. The
        // inputs were checked, and `outputs` allocated the outputs. Pages were checked against the width of
        // the table. The first kernel writes every part that the second kernel reads. Both kernels run on one
        // stream, and the parts are freed on the same stream.
        unsafe {
            if !spread {
                return launch(device, &[(forward, blocks)], |at| SinkAttentionParams {
                    out: at.write(out),
                    lse: at.write(lse),
                    ..self.params(arrays, inputs, at)
                });
            }
            let mut part_out: CudaSlice<f32> = output(device, parts * heads * head_dim)?;
            let mut part_sums: CudaSlice<f32> = output(device, parts * heads * PART_SUMS)?;
            launch(device, &[(chunk, chunk_tiles * kv_heads), (merge, blocks)], |at| SinkAttentionParams {
                out: at.write(out),
                lse: at.write(lse),
                part_out: at.write(&mut part_out),
                part_sums: at.write(&mut part_sums),
                ..self.params(arrays, inputs, at)
            })
        }
    }
}

impl DeviceLaunchPlan {
    /// Returns a launch plan for `kernels`, which must come from [`super::kernel_set`]. `pages` is a page
    /// table and its width, if keys are in a cache.
    ///
    /// # Errors
    /// When the kernels do not support these sizes, or a page table is too small.
    pub fn new(
        device: &CudaDevice,
        kernels: &'static KernelSet,
        attention: &Attention,
        sequences: &LaunchSequences,
        pages: Option<(&[i32], usize)>,
    ) -> Result<Self> {
        Self::with_split(device, kernels, attention, sequences, pages, sequences.should_split_keys(attention))
    }

    /// Returns a launch plan as [`DeviceLaunchPlan::new`] does, but with a given choice: chunks of keys in
    /// parallel, or one block per tile. It serves the check that both choices give the same bits.
    ///
    /// # Errors
    /// Errors of [`DeviceLaunchPlan::new`].
    pub fn with_split(
        device: &CudaDevice,
        kernels: &'static KernelSet,
        attention: &Attention,
        sequences: &LaunchSequences,
        pages: Option<(&[i32], usize)>,
        spread: bool,
    ) -> Result<Self> {
        let sizes = pages.map(|(table, pages_max)| (table.len(), pages_max));
        let (plan, arrays) = LaunchPlan::new(kernels, attention, sequences, sizes, SplitKv::Exactly(spread))?;
        let page_table = pages.map(|(table, _)| device.clone_htod(table)).transpose()?;
        Self::upload(device, plan, &arrays, page_table)
    }

    /// Returns a launch plan of [`DeviceLaunchPlan::key_gradients`] for a share of the keys: that of the
    /// `index`-th of `ranks` GPUs.
    ///
    /// # Errors
    /// Errors of [`DeviceLaunchPlan::new`].
    pub(super) fn for_share_of_keys(
        device: &CudaDevice,
        kernels: &'static KernelSet,
        attention: &Attention,
        sequences: &LaunchSequences,
        share: (usize, usize),
    ) -> Result<Self> {
        let (mut plan, mut arrays) =
            LaunchPlan::new(kernels, attention, sequences, None, SplitKv::Exactly(false))?;
        plan.keep_key_tiles(&mut arrays, share);
        Self::upload(device, plan, &arrays, None)
    }

    fn upload(
        device: &CudaDevice,
        plan: LaunchPlan,
        arrays: &[i32],
        page_table: Option<CudaSlice<i32>>,
    ) -> Result<Self> {
        let Attention { heads, sinks, .. } = plan.attention;
        let no_sinks = if sinks { None } else { Some(vec![NO_SINK; heads]) };
        Ok(Self {
            device: device.clone(),
            plan,
            arrays: device.clone_htod(arrays)?,
            page_table,
            no_sinks: no_sinks.map(|sinks| device.clone_htod(&sinks)).transpose()?,
        })
    }

    /// Allocates the outputs of [`DeviceLaunchPlan::forward`].
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn outputs(&self) -> Result<Outputs> {
        self.plan.outputs(&self.device)
    }

    /// Allocates the outputs of [`DeviceLaunchPlan::backward`].
    ///
    /// # Errors
    /// When the device has too little memory.
    pub fn gradients(&self) -> Result<Gradients> {
        // SAFETY: the backward pass writes every element before any kernel reads it.
        self.gradients_with(unsafe { self.device.alloc(self.key_value_count())? })
    }

    /// Allocates the outputs of [`DeviceLaunchPlan::backward`] except `dkv`.
    pub(super) fn gradients_with(&self, dkv: CudaSlice<bf16>) -> Result<Gradients> {
        let Attention { heads, head_dim, .. } = self.plan.attention;
        let rows = self.plan.shape.tokens * heads;
        let dsinks = self.device.alloc_zeros(heads)?;
        Ok(Gradients {
            delta: output(&self.device, rows)?,
            dq: output(&self.device, rows * head_dim)?,
            dkv,
            dsinks,
        })
    }

    /// Returns the number of values of keys with values, `T·2·M·D`.
    pub(super) fn key_value_count(&self) -> usize {
        let Attention { kv_heads, head_dim, .. } = self.plan.attention;
        self.plan.shape.tokens * 2 * kv_heads * head_dim
    }

    /// Returns the parameters of the kernels without outputs, for tests.
    #[cfg(test)]
    pub(super) fn params<'a>(
        &'a self,
        inputs: &Inputs<'a>,
        at: &mut Addresses<'_, 'a>,
    ) -> Result<SinkAttentionParams> {
        let params = self.plan.params(&self.launch_arrays(), inputs, at);
        let sinks = self.no_sinks.as_ref().map_or(params.sinks, |sinks| at.read(sinks));
        Ok(SinkAttentionParams { sinks, ..params })
    }

    fn launch_arrays(&self) -> LaunchArrays<'_> {
        LaunchArrays { plan: &self.arrays, page_table: self.page_table.as_ref() }
    }

    /// Returns `inputs`. If `no_sinks` is given, it replaces the sinks.
    fn replace_sinks<'a>(
        &'a self,
        inputs: &Inputs<'a>,
        no_sinks: &'a Option<CudaView<'a, f32>>,
    ) -> Inputs<'a> {
        Inputs { sinks: no_sinks.as_ref().unwrap_or(inputs.sinks), ..*inputs }
    }

    /// Launches the forward pass.
    ///
    /// # Errors
    /// When sizes disagree, or the driver fails.
    pub fn forward(&self, inputs: &Inputs, outputs: &mut Outputs) -> Result<()> {
        let no_sinks = self.no_sinks.as_ref().map(CudaSlice::as_view);
        let inputs = self.replace_sinks(inputs, &no_sinks);
        self.plan.forward(&self.device, &self.launch_arrays(), &inputs, outputs)
    }

    /// Launches the backward pass of [`DeviceLaunchPlan::forward`] for the gradient `dout [T, N, D]` of the
    /// output. Keys must be packed, not cached.
    ///
    /// # Errors
    /// When sizes disagree, or the driver fails.
    pub fn backward(
        &self,
        inputs: &Inputs,
        out: &CudaView<bf16>,
        lse: &DeviceLse,
        dout: &CudaView<bf16>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.query_gradients(inputs, out, lse, dout, gradients)?;
        let Gradients { delta, dkv, .. } = gradients;
        self.key_gradients(inputs, [&lse.as_view(), &delta.as_view()], dout, dkv)
    }

    /// Launches the part of [`DeviceLaunchPlan::backward`] that writes the gradients of queries and sinks.
    pub(super) fn query_gradients(
        &self,
        inputs: &Inputs,
        out: &CudaView<bf16>,
        lse: &DeviceLse,
        dout: &CudaView<bf16>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let no_sinks = self.no_sinks.as_ref().map(CudaSlice::as_view);
        let inputs = &self.replace_sinks(inputs, &no_sinks);
        let LaunchPlan { kernels, attention, shape, .. } = self.plan;
        self.check_gradients(inputs)?;
        let Attention { heads, kv_heads, head_dim, sinks, sink_gradient, .. } = attention;
        let rows = shape.tokens * heads;
        if out.len() != rows * head_dim || dout.len() != rows * head_dim || lse.len() != rows {
            let (out, dout, lse) = (out.len(), dout.len(), lse.len());
            bail!(
                "sink_attention: outputs with {out}, their gradient with {dout} and lse with {lse} elements do not fit {rows} rows"
            );
        }
        let KernelSet { delta, dq, dsinks, .. } = kernels;
        let kernels = [
            (delta, rows.div_ceil(DELTA_ROWS)),
            (dq, shape.query_tiles * kv_heads),
            (dsinks, if sinks && sink_gradient { heads } else { 0 }),
        ];
        // SAFETY: as in `forward`. `gradients` allocated the gradients.
        unsafe {
            launch(&self.device, &kernels, |at| SinkAttentionParams {
                out: at.read(out),
                lse: at.read(lse),
                dout: at.read(dout),
                delta: at.write(&mut gradients.delta),
                dq: at.write(&mut gradients.dq),
                dsinks: at.write(&mut gradients.dsinks),
                ..self.plan.params(&self.launch_arrays(), inputs, at)
            })
        }
    }

    /// Launches the part of [`DeviceLaunchPlan::backward`] that writes the gradients of keys and values to
    /// `dkv [T, 2, M, D]`. `numbers` are the log-sum-exps of the forward pass and the dot products of outputs
    /// and their gradients, `[T, N]` each.
    ///
    /// # Errors
    /// When sizes disagree, or the driver fails.
    pub(super) fn key_gradients(
        &self,
        inputs: &Inputs,
        numbers: [&CudaView<f32>; 2],
        dout: &CudaView<bf16>,
        dkv: &mut CudaSlice<bf16>,
    ) -> Result<()> {
        let no_sinks = self.no_sinks.as_ref().map(CudaSlice::as_view);
        let inputs = &self.replace_sinks(inputs, &no_sinks);
        let LaunchPlan { kernels, attention, shape, starts } = self.plan;
        self.check_gradients(inputs)?;
        let Attention { heads, kv_heads, head_dim, .. } = attention;
        let rows = shape.tokens * heads;
        let [lse, delta] = numbers;
        if lse.len() != rows || delta.len() != rows || dout.len() != rows * head_dim {
            let (lse, delta, dout) = (lse.len(), delta.len(), dout.len());
            bail!(
                "sink_attention: lse with {lse}, delta with {delta} and the output's gradient with {dout} elements do not fit {rows} rows"
            );
        }
        if dkv.len() != self.key_value_count() {
            bail!("sink_attention: a gradient of {} elements for {}", dkv.len(), self.key_value_count());
        }
        // SAFETY: as in `forward`. The sizes of all arguments were checked.
        unsafe {
            launch(&self.device, &[(&kernels.dkv, shape.key_tiles * kv_heads)], |at| {
                let dk = at.write(dkv);
                let params = self.plan.params(&self.launch_arrays(), inputs, at);
                SinkAttentionParams {
                    lse: at.read(lse),
                    delta: at.read(delta),
                    dout: at.read(dout),
                    dk,
                    dv: dk + 2 * (kv_heads * head_dim) as u64,
                    tiles: params.tiles + 4 * (starts[3] - starts[2]) as u64,
                    ..params
                }
            })
        }
    }

    /// Checks what all kernels of the backward pass need.
    fn check_gradients(&self, inputs: &Inputs) -> Result<()> {
        if self.plan.shape.pages_max.is_some() {
            bail!("sink_attention: keys in a cache have no gradients");
        }
        self.plan.check_inputs(inputs)
    }
}
