//! Tests that run the checks, on a GPU or on the emulated driver.

use super::{GpuCheckArgs, Part, run};
use crate::error::EXIT_SUCCESS;

#[test]
fn every_op_is_timed() {
    let device = crate::ops::cuda::open(0).unwrap();
    super::speed_ops::run(&device, true).unwrap();
}

#[test]
fn small_checks_pass() {
    let parts = vec![Part::Device, Part::Primitives, Part::Seeded, Part::Oracle, Part::Links];
    assert_eq!(run(&GpuCheckArgs { parts, small: true, ..GpuCheckArgs::default() }).unwrap(), EXIT_SUCCESS);
}
