//! `model.dtype = "bf16_dot"` through the binary: on a processor that has its dot products, and on one
//! that has not.

use super::*;
use crate::skips;
use rloss::ops::product::Precision;

const DOT: &str = "model.dtype=bf16_dot";

#[test]
fn products_in_bf16_are_refused_where_the_processor_has_none() {
    if Precision::Bf16Dot.is_supported() {
        // The other test runs.
        return;
    }
    let (_folder, [out]) = scratch(["run"]);
    refused(&mut small(&out, &[DOT]), &["model.dtype", "AVX-512 BF16", "\"bf16\""]);
    assert!(!out.exists());
}

#[test]
fn a_run_in_bf16_products_has_no_gap_and_goes_on_to_the_same_bits() {
    if !Precision::Bf16Dot.is_supported() {
        return skips::note(skips::NO_BF16, "");
    }
    let (folder, [whole, broken]) = scratch(["whole", "broken"]);
    let constant = [DOT, "train.optimizer.schedule=constant"];
    done(&mut small(&whole, &constant));
    let rows = results(&whole);
    let gaps: Vec<f64> =
        rows.iter().filter_map(|row| row["mismatch/log_ppl_abs_diff_max"].as_f64()).collect();
    assert!(!gaps.is_empty() && gaps.iter().all(|gap| *gap == 0.0), "{gaps:?}");

    done(&mut small(&broken, &[&constant[..], &["train.steps=2", "parallel.threads=1"]].concat()));
    done(&mut resumed(&broken, &constant));
    assert_eq!(results(&broken), rows);
    assert!(trainer_state(&broken) == trainer_state(&whole));

    // Its checkpoint lies in bf16 on disk, and is multiplied as it was trained.
    let mut check = rloss();
    check.arg("check-mismatch").arg(&whole).arg("--out").arg(folder.path().join("links"));
    let output = output(&mut check);
    assert!(output.code == Some(0), "{}", output.stderr);
    assert!(output.stdout.contains("rollout and training are bitwise equal"), "{}", output.stdout);

    // Other numbers than those of rounded weights multiplied in f32.
    let f32 = folder.path().join("f32");
    done(&mut small(&f32, &["model.dtype=bf16", "train.optimizer.schedule=constant"]));
    assert_ne!(results(&f32), rows);
}
