//! Rollout and training are one forward: the links of the proof, on 10,000 sampled tokens. For 100,000 see
//! `examples/one_forward.rs`.

pub mod cases;

use crate::skips;
use rloss::mismatch::bitwise_equality::EqualityCheck;
use rloss::ops::threads::Threads;

const TOKENS: usize = 10_000;

fn check(name: &str) -> Vec<EqualityCheck> {
    let case = cases::cases().into_iter().find(|case| case.name == name).unwrap();
    if !case.is_here() {
        skips::note(skips::NO_BF16, "");
        return vec![];
    }
    let links = case.links(&Threads::new(2).unwrap(), case.tokens(TOKENS)).unwrap();
    assert!(links.last().unwrap().tokens >= case.tokens(TOKENS));
    for link in &links {
        assert!(link.is_bit_equal(), "{name}: {link:?}");
        assert_eq!((link.logprob_abs_diff_max, link.bit_equal_fraction()), (0.0, 1.0));
    }
    links
}

macro_rules! links_hold {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            let links = check($name);
            if links.is_empty() {
                return;
            }
            let names: Vec<_> = links.iter().map(|link| link.name).collect();
            assert_eq!(names, ["batch_invariance", "prefill_equals_training", "decode_equals_prefill", "rollout_equals_training"]);
        })*

        #[test]
        fn every_case_is_checked() {
            let checked = [$($name,)*];
            assert!(cases::cases().iter().all(|case| checked.contains(&case.name)));
            assert_eq!(cases::cases().iter().map(|case| case.tokens(100)).sum::<usize>(), 100);
        }
    };
}

links_hold! {
    windows_crossed_many_times: "windows crossed many times",
    chunks_of_keys_crossed: "chunks of keys crossed",
    tool_output_inserted: "tool output inserted",
    groups_share_a_prefill: "groups share a prefill",
    sequences_leave_and_enter: "sequences leave and enter",
    temperature_below_1: "temperature 0.6",
    temperature_above_1: "temperature 1.7",
    top_p: "top-p 0.9",
    top_k: "top-k 20",
    min_p: "min-p 0.05",
    all_truncations_together: "top-p 0.9, top-k 20, min-p 0.05, temperature 0.6",
    odd_sizes: "odd sizes",
    weights_rounded_to_bf16: "weights rounded to bf16",
    dot_products_of_bf16: "dot products of bf16",
    dot_products_of_bf16_of_a_small_model: "dot products of bf16, small model",
    hidden_size_2880: "hidden size 2880",
    small_model: "small model",
    dense_family: "dense family",
    dense_family_tied: "dense family, tied, odd sizes",
    qwen3_with_heads_of_128: "Qwen3, tied, heads of 128",
    qwen3_with_experts: "Qwen3 with experts",
}
