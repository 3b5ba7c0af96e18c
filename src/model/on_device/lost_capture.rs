//! Decode whose CUDA graph capture is lost at any launch.

use super::{config, floats, ids, learner};
use crate::model::cache::{CacheCapacity, CacheFactory};
use crate::model::decode::Decoder;
use crate::model::decoder_stack::keep_nothing;
use crate::model::families::Family;
use crate::ops::cuda::open;
use crate::ops::select_rows;
use std::process::Command;
use std::sync::Arc;

/// The emulated driver loses each capture at the launch with this number, from 1.
const LOSES_CAPTURE: &str = "CUDA_EMULATOR_LOSES_CAPTURE";
const STEPS: u32 = 3;

#[test]
fn recorded_steps_have_the_bits_of_separate_launches() {
    let gpu = open(0).unwrap();
    let config = config(Family::default(), 4, 2, 20);
    let learner = learner(&config, &gpu);
    let stack = learner.sampler();
    let capacity = CacheCapacity { sequences: 4, tokens: 40, fed_tokens_max: 40 };
    let caches = CacheFactory::new(&config, &gpu, capacity).unwrap();
    let mut prompt = caches.sequence();
    stack.forward_cached(ids(21), &mut [&mut prompt], &[21], &mut keep_nothing).unwrap();
    let (mut recorded, mut plain) = ([prompt.clone(), caches.sequence()], [prompt, caches.sequence()]);
    let mut decoder = Decoder::new(&stack, capacity).unwrap();
    for step in 0..STEPS {
        let tokens = vec![step, step + 9];
        let mut open: Vec<_> = recorded.iter_mut().collect();
        let (hidden, rows) = decoder.decode_step(&stack, &tokens, &mut open).unwrap();
        let got = floats(&select_rows(&hidden, &Arc::new(rows)).unwrap());
        let mut open: Vec<_> = plain.iter_mut().collect();
        let separate = stack.forward_cached(tokens, &mut open, &[1; 2], &mut keep_nothing).unwrap();
        assert_eq!(got, floats(&separate), "step {step}");
    }
    println!("replayed: {}", decoder.counts.replays);
}

/// The driver reads its variables from the environment of the process, so each case has its own process.
#[test]
fn a_capture_lost_at_any_launch_is_told_and_decode_goes_on() {
    let gpu = open(0).unwrap();
    let name = gpu.as_cuda_device().unwrap().cuda_stream().context().name().unwrap();
    if name != "emulated H100" {
        return println!("skipped: {name} loses no capture on request");
    }
    let test = "model::on_device::lost_capture::recorded_steps_have_the_bits_of_separate_launches";
    for launch in 1..1000 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--nocapture"]).env(LOSES_CAPTURE, launch.to_string());
        let output = child.output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert!(output.status.success(), "launch {launch}: {said}");
        let complaint = said.lines().find(|line| line.contains("cuda-emulator:") && !line.contains("leaked"));
        assert_eq!(complaint, None, "launch {launch}");
        if !said.contains("CUDA graph capture of decode failed") {
            // The step has fewer launches.
            assert!(launch > 20 && said.contains(&format!("replayed: {}", STEPS - 1)), "{launch}: {said}");
            return println!("{} launches in a step", launch - 1);
        }
        assert!(said.contains("replayed: 0"), "launch {launch}: {said}");
    }
    panic!("no step has so many launches");
}
