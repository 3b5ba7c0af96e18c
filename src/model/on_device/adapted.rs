//! Tests of a model whose experts are packed MXFP4 matrices. Only its adapters are trained.

use super::*;
use crate::model::config::WeightFormat;
use crate::model::matrix::{Adapter, LowRankFactors};
use crate::ops::mxfp4;
use crate::ops::packed_weights::PackedMatrix;
use crate::random::{Purpose, stream};
use rand::Rng;

/// Returns a config whose sizes divide into MXFP4 blocks of 32.
pub(super) fn blocks(heads: usize, kv_heads: usize) -> Config {
    Config { hidden_size: 64, intermediate_size: 32, ..config(Family::default(), heads, kv_heads, 20) }
}

/// Returns frozen weights with trainable factors of rank `rank` for each matrix except the LM head. There are
/// no factors of rank 0.
pub(super) fn adapted(config: &Config, rank: usize, device: &Device) -> Learner {
    let settings = InitSettings { embedding_std: 1.0, head_scale: 1.0, sink: 0.5 };
    let copy_rounded = |values: Vec<f32>, shape: &[usize], matrix: bool| {
        let rounded = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let dtype = if matrix && device.is_cuda() { DType::BF16 } else { DType::F32 };
        rounded.to_dtype(dtype).unwrap().to_device(device).unwrap()
    };
    let (mut bases, mut factors) = (HashMap::new(), HashMap::new());
    let (mut names, mut variables, mut buffers) = (vec![], vec![], vec![]);
    for (spec, values) in init(config, &settings, 5).unwrap() {
        let matrix = spec.packed_format(WeightFormat::Bf16).is_some();
        let shape = spec.working_shape();
        if rank > 0 && matrix && !spec.is_lookup_table() && spec.name != "lm_head.weight" {
            let experts = &shape[..shape.len() - 2];
            for [k, n] in [[shape[shape.len() - 2], rank], [rank, shape[shape.len() - 1]]] {
                let shape = [experts, &[k, n]].concat();
                let mut rng = stream(3, Purpose::Initialisation, &[names.len() as u64]);
                let values = (0..shape.iter().product()).map(|_| rng.random_range(-0.3f32..0.3)).collect();
                variables.push(Var::from_tensor(&copy_rounded(values, &shape, true)).unwrap());
                buffers.push(Tensor::zeros(shape, DType::F32, device).unwrap());
                names.push(format!("{} [{k}, {n}]", spec.name));
            }
            factors.insert(spec.name.clone(), names.len() - 2);
        }
        let base = if spec.is_expert_matrix() {
            let shape = spec.matrix_shape().unwrap();
            let (blocks, scales) = mxfp4::encode(&values, shape);
            Weight::Packed(Arc::new(
                PackedMatrix::from_mxfp4(&blocks, &scales, shape).to_device(device).unwrap(),
            ))
        } else {
            Weight::dense(&copy_rounded(values, &shape, matrix))
        };
        bases.insert(spec.name, base);
    }
    let gradients = Arc::new(Buffers(buffers));
    let factor = |i: usize| Parameter::with_gradient_sink(&variables[i], gradients.clone(), i);
    let adapter = |(name, &i): (&String, &usize)| {
        let factors = LowRankFactors { a: factor(i), b: factor(i + 1), scale: 0.5 };
        (name.clone(), Adapter::Whole(factors))
    };
    let adapters = factors.iter().map(adapter).collect();
    let find = |name: &str| Ok(bases[name].clone());
    let tensors = ModelTensors { find: &find, adapters: &adapters, expert_parallel: None };
    let weights = Weights::new(config, false, 0, None, tensors).unwrap();
    Learner::new(config, weights, names, gradients)
}

#[test]
fn decode_and_chunks_with_adapters_have_the_bits_of_training() {
    let gpu = open(0).unwrap();
    for (config, rank) in [(blocks(4, 2), 8), (blocks(3, 1), 3)] {
        check_sampling(&config, &adapted(&config, rank, &gpu), &gpu);
    }
}

#[test]
fn gradients_of_adapters_are_the_cpus_up_to_bf16() {
    let gpu = open(0).unwrap();
    for (config, rank) in [(blocks(4, 2), 8), (blocks(2, 1), 1)] {
        check_gradients([&Device::Cpu, &gpu].map(|device| adapted(&config, rank, device)), &gpu);
    }
}
