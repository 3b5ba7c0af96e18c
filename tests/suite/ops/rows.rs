//! Ops on rows: linear, norm, rope, SwiGLU, embedding.

use super::*;
use rloss::ops;
use rloss::ops::embedding::select_rows;
use rloss::ops::rope::{RopeTable, Rotation};

#[test]
fn linear_has_the_values_and_gradients_of_its_formula() {
    for (t, k, n) in [(1, 3, 5), (7, 36, 1), (4, 1, 9), (5, 17, 20)] {
        let (x, w, b) = (input(&[t, k], 1.0, 1), input(&[k, n], 1.0, 2), input(&[n], 1.0, 3));
        check(
            &format!("linear {t} {k} {n}"),
            &[&x, &w, &b],
            |v| ops::linear(v[0], &v[1].0, Some(&v[2].0)).unwrap(),
            |v| {
                let dot = |r: usize, j: usize| (0..k).map(|c| v[0][r * k + c] * v[1][c * n + j]).sum::<f64>();
                (0..t * n).map(|i| dot(i / n, i % n) + v[2][i % n]).collect()
            },
        );
    }
}

#[test]
fn rms_norm_has_the_values_and_gradients_of_its_formula() {
    let (t, h, eps) = (4, 37, 1e-2);
    let (x, w) = (input(&[t, h], 0.3, 4), input(&[h], 1.0, 5));
    check(
        "rms_norm",
        &[&x, &w],
        |v| ops::rms_norm(v[0], v[1], eps).unwrap(),
        |v| {
            let rows = v[0].chunks_exact(h);
            rows.flat_map(|x| {
                let rms = (x.iter().map(|x| x * x).sum::<f64>() / h as f64 + eps as f32 as f64).sqrt();
                x.iter().zip(&v[1]).map(|(x, w)| x / rms * w).collect::<Vec<_>>()
            })
            .collect()
        },
    );
}

/// The rotation of `[heads][d]` in f64; the angles are rounded to f32 first, as the table's are.
fn rotate(x: &[f64], d: usize, frequencies: &[f32], position: u32, factor: f64) -> Vec<f64> {
    let half = d / 2;
    let mut out = x.to_vec();
    for head in out.chunks_exact_mut(d) {
        for i in 0..half {
            let (a, b) = (head[i], head[i + half]);
            let (sine, cosine) = ((position as f32 * frequencies[i]) as f64).sin_cos();
            head[i] = factor * (a * cosine - b * sine);
            head[i + half] = factor * (b * cosine + a * sine);
        }
    }
    out
}

#[test]
fn rope_turns_halves_and_its_gradient_turns_back() {
    let (d, factor, frequencies) = (6, 1.25, [1.0f32, 0.1, 0.003]);
    let positions = vec![0u32, 1, 2, 0, 900];
    let table = Arc::new(RopeTable::new(&frequencies, 901, factor));
    let rotation = Rotation::new(table, positions.clone());
    let turned = |x: &[f64], heads: usize| -> Vec<Vec<f64>> {
        let rows = x.chunks_exact(heads * d).zip(&positions);
        rows.map(|(x, &p)| rotate(x, d, &frequencies, p, factor)).collect()
    };
    let q = input(&[5, 3 * d], 1.0, 6);
    check("rope", &[&q], |v| ops::rope(v[0], 3, &rotation).unwrap(), |v| turned(&v[0], 3).concat());
    let (k, v) = (input(&[5, 2 * d], 1.0, 7), input(&[5, 2 * d], 1.0, 8));
    check(
        "rope_keys_with_values",
        &[&k, &v],
        |v| ops::rope_keys_with_values(v[0], v[1], 2, &rotation).unwrap(),
        |v| {
            let rows = turned(&v[0], 2).into_iter().zip(v[1].chunks_exact(2 * d));
            rows.flat_map(|(k, v)| [k, v.to_vec()].concat()).collect()
        },
    );
    assert!(ops::rope(&input(&[5, 8], 1.0, 9), 1, &rotation).is_err(), "the table is for heads of 6");
}

#[test]
fn swiglu_clamps_gate_above_and_up_on_both_sides() {
    let (t, i, limit) = (6, 11, 1.5);
    // Noise of ±3 reaches every side of the clamps.
    let x = input(&[t, 2 * i], 3.0, 9);
    let values = floats(&x);
    assert!(values.iter().any(|&v| v > 1.5) && values.iter().any(|&v| v < -1.5));
    check(
        "swiglu",
        &[&x],
        |v| ops::swiglu(v[0], limit, 1.702).unwrap(),
        |v| {
            let pairs = v[0].chunks_exact(2);
            pairs
                .map(|p| {
                    let (gate, up) = (p[0].min(limit), p[1].clamp(-limit, limit));
                    (up + 1.0) * gate / (1.0 + (-1.702f32 as f64 * gate).exp())
                })
                .collect()
        },
    );
}

#[test]
fn silu_gated_has_the_values_and_gradients_of_its_formula() {
    let (gate, up) = (input(&[5, 19], 3.0, 13), input(&[5, 19], 2.0, 14));
    check(
        "silu_gated",
        &[&gate, &up],
        |v| ops::silu_and_mul(v[0], v[1]).unwrap(),
        |v| v[0].iter().zip(&v[1]).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect(),
    );
    assert!(ops::silu_and_mul(&gate, &up.t().unwrap()).is_err(), "shapes must agree");
}

#[test]
fn repeated_ids_add_their_gradients_and_absent_ones_get_none() {
    let (rows, h) = (5, 3);
    let ids = Arc::new(vec![4u32, 1, 4, 4, 0, 1]);
    let pick = |w: &[f64]| ids.iter().flat_map(|&id| w[id as usize * h..][..h].to_vec()).collect();
    let w = input(&[rows, h], 1.0, 10);
    check("embedding", &[&w], |v| ops::embedding(&v[0].0, &ids).unwrap(), |v| pick(&v[0]));
    check("select_rows", &[&w], |v| select_rows(v[0], &ids).unwrap(), |v| pick(&v[0]));
    let tied = input(&[h, rows], 1.0, 15);
    let columns =
        |w: &[f64]| ids.iter().flat_map(|&id| (0..h).map(move |i| w[i * rows + id as usize])).collect();
    check("tied_embedding", &[&tied], |v| ops::tied_embedding(&v[0].0, &ids).unwrap(), |v| columns(&v[0]));
    assert!(ops::tied_embedding(&rloss::ops::Parameter::constant(&tied), &Arc::new(vec![5])).is_err());
    let (gradients, _, _) = gradients(&[&w], |v| ops::embedding(&v[0].0, &ids).unwrap());
    assert_eq!(gradients[0][2 * h..4 * h], [0.0; 6], "rows 2 and 3 are not looked up");
    assert!(ops::embedding(&rloss::ops::Parameter::constant(&w), &Arc::new(vec![5])).is_err(), "5 is no row");
}
