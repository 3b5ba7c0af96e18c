//! Tests that run the checks, on a GPU or on the emulated driver.

use super::{Arguments, Part, run};
use rloss::error::EXIT_SUCCESS;

#[test]
fn small_checks_pass() {
    let parts = vec![Part::Device, Part::Primitives, Part::Seeded, Part::Oracle, Part::Links];
    assert_eq!(run(&Arguments { parts, small: true, ..Arguments::default() }).unwrap(), EXIT_SUCCESS);
}

#[test]
fn a_product_is_computed_in_every_way() {
    let device = rloss::ops::cuda::open(0).unwrap();
    let ways = super::instruction_properties::compare_ways(device.as_cuda_device().unwrap()).unwrap();
    assert_eq!(ways.len(), 7);
    // On a GPU some may differ by roundings. Unwritten words would differ everywhere.
    for (way, text) in ways {
        assert!(text.starts_with("the same bits") || !text.contains(": 131072 of"), "{way}: {text}");
    }
}
