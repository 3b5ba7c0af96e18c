//! The checks themselves, where there is a GPU or the emulated driver.

use super::{GpuCheckArgs, Part, run};
use crate::error::EXIT_DONE;

#[test]
fn small_checks_pass() {
    let parts = vec![Part::Device, Part::Primitives, Part::Seeded, Part::Oracle, Part::Links];
    assert_eq!(
        run(&GpuCheckArgs { parts, small: true, device: 0, write_seeded: None, peers: None }).unwrap(),
        EXIT_DONE
    );
}
