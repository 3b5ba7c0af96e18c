//! Router, dispatch, grouped product, combine, load balancing: against plain loops over tokens and experts.

use super::*;
use rloss::ops::{self, Dispatch};

/// Sizes of a case and distinct experts a token, in any order.
struct Case {
    tokens: usize,
    top_k: usize,
    experts: usize,
    routes: Vec<u16>,
}

/// Routes `[T][K]` as the ops take them.
fn routes(routes: &[u16], top_k: usize) -> Tensor {
    let ids: Vec<u32> = routes.iter().map(|&e| u32::from(e)).collect();
    Tensor::from_vec(ids, (routes.len() / top_k, top_k), &Device::Cpu).unwrap()
}

fn plan(of: &[u16], top_k: usize, experts: usize) -> Dispatch {
    Dispatch::new(&routes(of, top_k), experts).unwrap()
}

/// The router's choice, `[T][K]`.
fn chosen(logits: &Tensor, top_k: usize) -> Vec<u32> {
    ops::route(logits, top_k).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut rng = stream(seed, Purpose::Problem, &[]);
        let experts = rng.random_range(1..=9);
        let (tokens, top_k) = (rng.random_range(1..=12), rng.random_range(1..=experts));
        // Few experts in use in some cases: the others get no row.
        let used = rng.random_range(top_k..=experts) as u16;
        let mut routes = vec![];
        for _ in 0..tokens {
            let first = routes.len();
            while routes.len() < first + top_k {
                let e = rng.random_range(0..used);
                if !routes[first..].contains(&e) {
                    routes.push(e);
                }
            }
        }
        Self { tokens, top_k, experts, routes }
    }

    fn plan(&self) -> Dispatch {
        plan(&self.routes, self.top_k, self.experts)
    }

    /// (token, slot) of every sorted row: by expert, then token.
    fn sorted(&self) -> Vec<usize> {
        let mut slots: Vec<usize> = (0..self.routes.len()).collect();
        slots.sort_by_key(|&s| (self.routes[s], s));
        slots
    }
}

#[test]
fn dispatch_grouped_product_and_combine_equal_plain_loops() {
    for seed in 0..40 {
        let case = Case::random(seed);
        let (plan, sorted) = (case.plan(), case.sorted());
        let Case { tokens, top_k, experts, .. } = case;
        let (k, n) = (1 + seed as usize % 5, 1 + seed as usize % 7);
        let counts = plan.counts(None).unwrap();
        assert_eq!(counts.len(), experts);
        for (e, &count) in counts.iter().enumerate() {
            assert_eq!(count, case.routes.iter().filter(|&&r| r as usize == e).count());
        }

        let x = input(&[tokens, k], 1.0, seed);
        check(
            &format!("dispatch {seed}"),
            &[&x],
            |v| ops::dispatch(v[0], &plan).unwrap(),
            |v| sorted.iter().flat_map(|s| v[0][s / top_k * k..][..k].to_vec()).collect(),
        );

        let rows = input(&[tokens * top_k, k], 1.0, seed + 1);
        let (w, b) = (input(&[experts, k, n], 1.0, seed + 2), input(&[experts, n], 1.0, seed + 3));
        check(
            &format!("grouped_linear {seed}"),
            &[&rows, &w, &b],
            |v| ops::grouped_linear(v[0], &v[1].0, Some(&v[2].0), &plan).unwrap(),
            |v| {
                let at = |row: usize, j: usize| {
                    let e = case.routes[sorted[row]] as usize;
                    let dot = |c: usize| v[0][row * k + c] * v[1][(e * k + c) * n + j];
                    v[2][e * n + j] + (0..k).map(dot).sum::<f64>()
                };
                (0..sorted.len() * n).map(|i| at(i / n, i % n)).collect()
            },
        );

        check(
            &format!("grouped_linear without bias {seed}"),
            &[&rows, &w],
            |v| ops::grouped_linear(v[0], &v[1].0, None, &plan).unwrap(),
            |v| {
                let at = |row: usize, j: usize| -> f64 {
                    let e = case.routes[sorted[row]] as usize;
                    (0..k).map(|c| v[0][row * k + c] * v[1][(e * k + c) * n + j]).sum()
                };
                (0..sorted.len() * n).map(|i| at(i / n, i % n)).collect()
            },
        );

        let (out, shares) =
            (input(&[tokens * top_k, n], 1.0, seed + 4), input(&[tokens, top_k], 1.0, seed + 5));
        check(
            &format!("combine {seed}"),
            &[&out, &shares],
            |v| ops::combine(v[0], v[1], &plan).unwrap(),
            |v| {
                let mut y = vec![0.0; tokens * n];
                for (row, &slot) in sorted.iter().enumerate() {
                    for j in 0..n {
                        y[slot / top_k * n + j] += v[1][slot] * v[0][row * n + j];
                    }
                }
                y
            },
        );
    }
}

#[test]
fn a_token_alone_gets_the_same_bits_from_the_experts_as_in_a_batch() {
    for seed in 100..130 {
        let case = Case::random(seed);
        let (k, n) = (33, 10);
        let x = floats(&input(&[case.tokens, k], 1.0, seed));
        let w = input(&[case.experts, k, n], 1.0, seed + 1);
        let b = input(&[case.experts, n], 1.0, seed + 2);
        let shares = noise(case.tokens * case.top_k, 1.0, seed + 3);
        let run = |x: &[f32], routes: &[u16], shares: &[f32]| {
            let tokens = x.len() / k;
            let plan = plan(routes, case.top_k, case.experts);
            let tensor =
                |v: &[f32], width| Tensor::from_vec(v.to_vec(), (tokens, width), &Device::Cpu).unwrap();
            let rows = ops::dispatch(&tensor(x, k), &plan).unwrap();
            let (w, b) = (Parameter::constant(&w), Parameter::constant(&b));
            let rows = ops::grouped_linear(&rows, &w, Some(&b), &plan).unwrap();
            floats(&ops::combine(&rows, &tensor(shares, case.top_k), &plan).unwrap())
        };
        let whole = run(&x, &case.routes, &shares);
        for t in 0..case.tokens {
            let slots = t * case.top_k..(t + 1) * case.top_k;
            let alone = run(&x[t * k..(t + 1) * k], &case.routes[slots.clone()], &shares[slots]);
            assert_eq!(alone, whole[t * n..(t + 1) * n], "case {seed} token {t}");
        }
    }
}

#[test]
fn the_router_takes_the_largest_and_the_lowest_index_of_equals() {
    let logits = Tensor::new(
        &[[1f32, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, -1.0, 5.0, 5.0]],
        &Device::Cpu,
    )
    .unwrap();
    assert_eq!(chosen(&logits, 2), [1, 2, 0, 1, 3, 4]);
    assert_eq!(chosen(&logits, 4), [1, 2, 4, 3, 0, 1, 2, 3, 3, 4, 0, 1]);
    assert!(ops::route(&logits, 6).is_err());
}

#[test]
fn the_router_equals_a_stable_sort_on_random_logits_with_ties() {
    for seed in 0..50 {
        let (tokens, experts) = (8, 6);
        // Rounded to quarters: ties are common.
        let values: Vec<f32> =
            noise(tokens * experts, 1.0, 300 + seed).iter().map(|v| (v * 4.0).round() / 4.0).collect();
        let logits = Tensor::from_vec(values.clone(), (tokens, experts), &Device::Cpu).unwrap();
        for top_k in 1..=experts {
            let expected: Vec<u32> = values
                .chunks_exact(experts)
                .flat_map(|row| {
                    let mut order: Vec<u32> = (0..experts as u32).collect();
                    order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).unwrap());
                    order.truncate(top_k);
                    order
                })
                .collect();
            assert_eq!(chosen(&logits, top_k), expected, "{seed} {top_k}");
        }
    }
}

#[test]
fn the_router_softmax_is_over_the_chosen_experts_only() {
    for seed in 200..215 {
        let case = Case::random(seed);
        let (experts, top_k, picked) = (case.experts, case.top_k, routes(&case.routes, case.top_k));
        let logits = input(&[case.tokens, experts], 3.0, seed);
        let reference = |v: &[Vec<f64>]| {
            let rows = v[0].chunks_exact(experts).zip(case.routes.chunks_exact(top_k));
            rows.flat_map(|(z, chosen)| {
                let e: Vec<f64> = chosen.iter().map(|&e| z[e as usize].exp()).collect();
                let total: f64 = e.iter().sum();
                e.into_iter().map(|e| e / total).collect::<Vec<_>>()
            })
            .collect()
        };
        if top_k == 1 {
            // A softmax over one is 1 whatever the logit: no gradient, exactly.
            let (g, out, _) = super::gradients(&[&logits], |v| ops::top_k_softmax(v[0], &picked).unwrap());
            assert!(out.iter().all(|&w| w == 1.0) && g[0].iter().all(|&g| g == 0.0));
        } else {
            let op = |v: &[&super::Input]| ops::top_k_softmax(v[0], &picked).unwrap();
            check(&format!("top_k_softmax {seed}"), &[&logits], op, reference);
        }
    }
}

#[test]
fn load_balance_is_the_switch_loss_with_constant_fractions() {
    let (tokens, experts, counts) = (7, 5, [6usize, 0, 3, 4, 1]);
    // Two experts a token; which token has which does not matter.
    let all: Vec<u16> = (0..5).flat_map(|e| vec![e; counts[e as usize]]).collect();
    let dispatched = plan(&all, 2, experts);
    let logits = input(&[tokens, experts], 2.0, 30);
    check(
        "load_balance",
        &[&logits],
        |v| ops::load_balance(v[0], &dispatched, None).unwrap(),
        |v| {
            let mut loss = 0.0;
            for z in v[0].chunks_exact(experts) {
                let total: f64 = z.iter().map(|z| z.exp()).sum();
                for (z, &count) in z.iter().zip(&counts) {
                    loss += z.exp() / total * count as f64 / tokens as f64;
                }
            }
            vec![loss * experts as f64 / tokens as f64]
        },
    );
    // Equal logits and equal counts: the loss is the number of experts a token.
    let even = Var::zeros((6, 3), candle_core::DType::F32, &Device::Cpu).unwrap();
    assert_close(
        "balanced",
        &floats(&ops::load_balance(&even, &plan(&[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], 2, 3), None).unwrap()),
        &[2.0],
    );
}
