//! The head with a teacher: the reverse KL divergence over the whole vocabulary.

use super::*;
use rloss::ops;
use rloss::ops::reverse_kl::TeacherRows;
use rloss::ops::weight::Weight;
use serde::Deserialize;
use std::path::Path;

/// Rows of logits `h · w / τ` in f64, of which the first `vocabulary` columns are used, less their LSE.
fn log_softmax(h: &[f64], w: &[f64], columns: usize, vocabulary: usize, temperature: f64) -> Vec<Vec<f64>> {
    let width = w.len() / columns;
    let row = |h: &[f64]| {
        let logit = |j: usize| (0..width).map(|c| h[c] * w[c * columns + j]).sum::<f64>() / temperature;
        let z: Vec<f64> = (0..vocabulary).map(logit).collect();
        let highest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = highest + z.iter().map(|z| (z - highest).exp()).sum::<f64>().ln();
        z.iter().map(|z| z - sum).collect()
    };
    h.chunks_exact(width).map(row).collect()
}

fn doubles(tensor: &Tensor) -> Vec<f64> {
    floats(tensor).into_iter().map(f64::from).collect()
}

fn teacher(h: &Tensor, w: &Tensor) -> TeacherRows {
    TeacherRows { h: h.clone(), head: Weight::Dense(Parameter::constant(w)), adapter: None }
}

/// The teacher has its own width, and one column of padding more than the policy.
#[test]
fn the_divergence_has_the_value_and_the_gradient_of_its_formula() {
    for (rows, width, vocabulary, temperature) in [(5, 7, 37, 1.0), (3, 4, 16, 0.7), (4, 6, 3, 1.6)] {
        let targets: Arc<Vec<u32>> =
            Arc::new((0..rows as u32).map(|r| (r * 11 + 2) % vocabulary as u32).collect());
        let (h, w) = (input(&[rows, width], 2.0, 20), input(&[width, vocabulary], 1.0, 21));
        let (teacher_h, teacher_w) = (input(&[rows, 3], 2.0, 24), input(&[3, vocabulary + 1], 1.0, 25));
        let rows_of_teacher = teacher(&teacher_h, &teacher_w);
        let log_q =
            log_softmax(&doubles(&teacher_h), &doubles(&teacher_w), vocabulary + 1, vocabulary, temperature);
        check(
            &format!("reverse KL over {vocabulary} at {temperature}"),
            &[&h, &w],
            |v| {
                let weight = Weight::Dense(v[1].0.clone());
                ops::log_prob_entropy_and_kl(v[0], (&weight, None), &targets, &rows_of_teacher, temperature)
                    .unwrap()
            },
            |v| {
                let log_p = log_softmax(&v[0], &v[1], vocabulary, vocabulary, temperature);
                let of_targets = log_p.iter().zip(&*targets).map(|(row, &t)| row[t as usize]);
                let entropies = log_p.iter().map(|row| row.iter().map(|l| -l.exp() * l).sum::<f64>());
                let divergences = log_p
                    .iter()
                    .zip(&log_q)
                    .map(|(p, q)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
                of_targets.chain(entropies).chain(divergences).collect()
            },
        );
    }
}

/// Values and gradients for the upstream gradient of a case.
fn run(
    h: &Var,
    w: &Var,
    targets: &[u32],
    teacher: &TeacherRows,
    (temperature, upstream): (f64, &[f32]),
) -> [Vec<f32>; 3] {
    let dw = w.zeros_like().unwrap().detach();
    let sink = Arc::new(Sink { buffers: vec![dw.clone()], added: Default::default() });
    let weight = Weight::Dense(Parameter::with_gradient_sink(w, sink, 0));
    let upstream = Tensor::from_vec(upstream.to_vec(), (3, targets.len()), &Device::Cpu).unwrap();
    let (out, found) = super::run_with_gradients(
        &[h.as_tensor()],
        |_| upstream.clone(),
        || {
            ops::log_prob_entropy_and_kl(
                h,
                (&weight, None),
                &Arc::new(targets.to_vec()),
                teacher,
                temperature,
            )
            .unwrap()
        },
    );
    [floats(&out), floats(found[0].as_ref().unwrap()), floats(&dw)]
}

/// A vocabulary so large that the head works in several chunks of rows.
#[test]
fn chunks_of_rows_do_not_change_the_divergence_and_log_probs_keep_their_bits() {
    let (rows, vocabulary) = (10, 2_100_000);
    let (h, w) = (input(&[rows, 1], 1.0, 22), input(&[1, vocabulary], 3.0, 23));
    let (teacher_h, teacher_w) = (input(&[rows, 1], 1.0, 26), input(&[1, vocabulary], 3.0, 27));
    let targets: Vec<u32> = (0..rows as u32).map(|r| r * 199_991).collect();
    let all = teacher(&teacher_h, &teacher_w);
    let [out, dh, dw] = run(&h, &w, &targets, &all, (1.0, &vec![1.0; 3 * rows]));
    let plain = ops::log_prob_and_entropy(
        &h,
        &Weight::Dense(Parameter::constant(&w)),
        &Arc::new(targets.clone()),
        None,
        1.0,
    );
    assert_eq!(floats(&plain.unwrap()), out[..2 * rows]);
    let mut dw_summed = vec![0f64; vocabulary];
    for row in 0..rows {
        let value = Var::from_tensor(&h.narrow(0, row, 1).unwrap().copy().unwrap()).unwrap();
        let alone = teacher(&teacher_h.narrow(0, row, 1).unwrap().copy().unwrap(), &teacher_w);
        let [out_alone, dh_alone, dw_alone] =
            run(&value, &w, &targets[row..row + 1], &alone, (1.0, &[1.0; 3]));
        assert_eq!(out_alone, [out[row], out[rows + row], out[2 * rows + row]], "row {row}");
        assert_eq!(dh_alone, [dh[row]], "row {row}");
        dw_alone.iter().zip(&mut dw_summed).for_each(|(&g, sum)| *sum += g as f64);
    }
    assert_close("the weights' gradient", &dw, &dw_summed);
}

#[test]
fn a_teacher_that_does_not_fit_is_an_error_and_extreme_logits_stay_finite() {
    let tensor = |rows: &[[f32; 2]]| Tensor::from_vec(rows.concat(), (rows.len(), 2), &Device::Cpu).unwrap();
    let (h, w) = (tensor(&[[1.0, 0.0]]), tensor(&[[3e4, -3e4], [0.0, 0.0]]));
    let run = |rows: &TeacherRows| {
        let head = Weight::Dense(Parameter::constant(&w));
        ops::log_prob_entropy_and_kl(&h, (&head, None), &Arc::new(vec![0]), rows, 1.0)
    };
    let opposite = run(&teacher(&h, &tensor(&[[-3e4, 3e4], [0.0, 0.0]]))).unwrap();
    assert_eq!(floats(&opposite), [0.0, 0.0, 6e4]);
    let narrow = Tensor::new(&[[1f32], [1.0]], &Device::Cpu).unwrap();
    assert!(run(&teacher(&h, &narrow)).unwrap_err().to_string().contains("do not fit 1 rows of 2 logits"));
    let two_rows = tensor(&[[1.0, 0.0], [1.0, 0.0]]);
    assert!(run(&teacher(&two_rows, &w)).is_err());
}

/// A case of `scripts/make_reference_values.py distill_head`.
#[derive(Deserialize)]
struct TorchCase {
    temperature: f64,
    targets: Vec<u32>,
    h: Vec<f32>,
    w: Vec<f32>,
    teacher_h: Vec<f32>,
    teacher_w: Vec<f32>,
    gradient: Vec<f32>,
    values: Vec<f64>,
    dh: Vec<f64>,
    dw: Vec<f64>,
}

/// Returns the largest difference from torch of the values and of the two gradients, relative to the largest
/// value of each where that is above 1.
fn differences(case: &TorchCase) -> [f64; 3] {
    let rows = case.targets.len();
    let shaped = |values: &[f32], rows: usize| {
        Var::from_vec(values.to_vec(), (rows, values.len() / rows), &Device::Cpu).unwrap()
    };
    let h = shaped(&case.h, rows);
    let w = shaped(&case.w, case.h.len() / rows);
    let rows_of_teacher =
        teacher(&shaped(&case.teacher_h, rows), &shaped(&case.teacher_w, case.teacher_h.len() / rows));
    let got = run(&h, &w, &case.targets, &rows_of_teacher, (case.temperature, &case.gradient));
    let expected = [&case.values, &case.dh, &case.dw];
    std::array::from_fn(|i| {
        assert_eq!(got[i].len(), expected[i].len());
        let size = expected[i].iter().fold(1.0, |size: f64, value| size.max(value.abs()));
        let pairs = got[i].iter().zip(expected[i]);
        pairs.map(|(got, expected)| (f64::from(*got) - expected).abs() / size).fold(0.0, f64::max)
    })
}

#[test]
fn the_divergence_and_its_gradients_are_torchs() {
    let cases: Vec<TorchCase> =
        serde_json::from_str(include_str!("../../fixtures/distill_head.json")).unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let [values, dh, dw] = differences(&case);
        let worst = values.max(dh).max(dw);
        assert!(worst < 1e-5, "at {}: {values:e}, {dh:e}, {dw:e}", case.temperature);
    }
}

/// `just distill-parity` writes the cases with torch, for the vocabulary of Qwen2.5.
#[test]
#[ignore = "needs the file that scripts/make_reference_values.py distill writes"]
fn the_divergence_over_a_real_vocabulary_is_torchs() {
    let folder = std::env::var("DISTILL_PARITY").expect("DISTILL_PARITY names the folder");
    let read = |name: &str| -> Vec<u8> { std::fs::read(Path::new(&folder).join(name)).unwrap() };
    for name in ["at_1.0", "at_0.7"] {
        let floats = |field: &str| -> Vec<f32> {
            read(&format!("{name}.{field}")).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let doubles = |field: &str| -> Vec<f64> {
            read(&format!("{name}.{field}")).as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
        };
        let case = TorchCase {
            temperature: name.trim_start_matches("at_").parse().unwrap(),
            targets: floats("targets").into_iter().map(|target| target as u32).collect(),
            h: floats("h"),
            w: floats("w"),
            teacher_h: floats("teacher_h"),
            teacher_w: floats("teacher_w"),
            gradient: floats("gradient"),
            values: doubles("values"),
            dh: doubles("dh"),
            dw: doubles("dw"),
        };
        let [values, dh, dw] = differences(&case);
        let (rows, columns) = (case.targets.len(), case.w.len() * case.targets.len() / case.h.len());
        println!("{rows} rows, vocabulary {columns}, {name}: values {values:.1e}, dh {dh:.1e}, dW {dw:.1e}");
        assert!(values.max(dh).max(dw) < 1e-5);
    }
}
