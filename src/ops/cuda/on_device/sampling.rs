//! Tests of sampling from logits on a GPU or the emulated driver, compared with the CPU on the same logits.

use super::{floats, numbers};
use crate::ops::cuda::open;
use crate::ops::log_prob::row_stats;
use crate::ops::logits::{Logits, SamplingParameters};
use candle_core::{Device, Tensor};

/// Returns equal logits on the CPU and on a GPU.
fn both(z: &Tensor, gpu: &Device) -> [Logits; 2] {
    let (rows, width) = z.dims2().unwrap();
    let sums: Vec<f32> =
        floats(z).chunks(width).map(|z| row_stats(&mut z.to_vec(), 1.0).log_sum_exp).collect();
    let sums = Tensor::from_vec(sums, rows, &Device::Cpu).unwrap();
    [&Device::Cpu, gpu].map(|device| Logits {
        z: z.to_device(device).unwrap(),
        log_sum_exp: sums.to_device(device).unwrap(),
        blocks: None,
    })
}

#[test]
fn tokens_drawn_and_their_log_probs_are_the_cpus() {
    let gpu = open(0).unwrap();
    let all = SamplingParameters::with_temperature(1.0);
    let cases = [
        all,
        SamplingParameters::with_temperature(0.0),
        SamplingParameters { top_k: 3, ..all },
        SamplingParameters { top_p: 0.7, ..all },
        SamplingParameters { min_p: 0.2, ..all },
        SamplingParameters { temperature: 0.0, top_k: 2, ..all },
    ];
    for (rows, width) in [(1, 1), (3, 13), (2, 1024), (2, 9001)] {
        let [on_cpu, on_gpu] = both(&numbers(1, rows, width, 1.0), &gpu);
        let draws: Vec<(usize, f64)> =
            (0..10).map(|i| (i % rows, (0.618_033_988_749_895 * (i + 1) as f64).fract())).collect();
        for sampling in cases {
            let (exact, got) =
                (on_cpu.draw(&sampling, &draws).unwrap(), on_gpu.draw(&sampling, &draws).unwrap());
            assert_eq!(got, exact, "{sampling:?}, {rows} rows of {width}");
            let tokens: Vec<_> = draws.iter().zip(&got).map(|(draw, drawn)| (draw.0, drawn.token)).collect();
            let of_tokens = |logits: &Logits| logits.log_probs(&sampling, &tokens).unwrap();
            assert_eq!(of_tokens(&on_gpu), of_tokens(&on_cpu), "{sampling:?}");
        }
        assert_eq!(floats(on_gpu.scaled_logits()), floats(on_cpu.scaled_logits()));
    }
}

#[test]
fn logits_on_a_gpu_that_are_no_numbers_or_not_there_are_errors() {
    let gpu = open(0).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let [_, logits] = both(&Tensor::new(&[[0.0, 1.0], [bad, 0.0]], &Device::Cpu).unwrap(), &gpu);
        for temperature in [0.0, 1.0] {
            let sampling = SamplingParameters::with_temperature(temperature);
            assert_eq!(logits.draw(&sampling, &[]).unwrap(), []);
            assert_eq!(logits.draw(&sampling, &[(0, 0.99)]).unwrap()[0].token, 1);
            let error = logits.draw(&sampling, &[(0, 0.5), (1, 0.5)]).unwrap_err().to_string();
            assert!(error.contains("not finite"), "{error}");
        }
    }
    let [_, logits] = both(&Tensor::new(&[[0f32, 1.0]], &Device::Cpu).unwrap(), &gpu);
    for sampling in [
        SamplingParameters::with_temperature(1.0),
        SamplingParameters { top_k: 1, ..SamplingParameters::with_temperature(1.0) },
    ] {
        assert!(logits.log_probs(&sampling, &[]).unwrap().is_empty());
        let error = |e: candle_core::Error| e.to_string();
        assert!(logits.draw(&sampling, &[(1, 0.5)]).map_err(error).unwrap_err().contains("row 1 of 1"));
        let tokens = [(1, 0), (0, 2)];
        assert!(logits.log_probs(&sampling, &tokens[..1]).map_err(error).unwrap_err().contains("row 1 of 1"));
        let token = logits.log_probs(&sampling, &tokens[1..]).map_err(error).unwrap_err();
        assert!(token.contains("token 2 in a vocabulary of 2"), "{token}");
    }
}
