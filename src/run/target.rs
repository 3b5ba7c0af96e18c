//! Another machine to plan for: `rloss check RECIPE --for "8 x H200, 1500 GB"`. Any build can plan for it.

use super::memory::AvailableMemory;
use std::str::FromStr;

/// GPUs with compute capability 9.0, which the kernels need, with the bytes that a process finds free.
const GPUS: [(&str, u64); 4] = [
    ("H100", 84_900_000_000),
    ("H100 NVL", 100_000_000_000),
    ("H200", 150_000_000_000),
    ("GH200", 101_500_000_000),
];

const FORM: &str =
    "write the GPUs and the host's memory, such as \"8 x H200, 1500 GB\", or \"2 x 80 GB, 500 GB\"";

/// A machine with GPUs of one kind. Each has a process.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetMachine {
    pub gpus: usize,
    /// The kind of GPU, or its memory.
    pub gpu: String,
    /// Free memory of each GPU.
    gpu_bytes: u64,
    /// Memory of the whole host.
    host_bytes: u64,
}

impl TargetMachine {
    /// Returns the free memory of a GPU.
    pub fn gpu_memory(&self) -> AvailableMemory {
        AvailableMemory { bytes: self.gpu_bytes, limit: format!("free on each {}, as --for says", self.gpu) }
    }

    /// Returns the host's memory for each process.
    pub fn host_memory(&self) -> AvailableMemory {
        let limit = format!("for each of {} processes, as --for says", self.gpus);
        AvailableMemory { bytes: self.host_bytes / self.gpus as u64, limit }
    }
}

/// Reads `80 GB`.
fn bytes(text: &str) -> Option<u64> {
    let number: f64 = text.trim().strip_suffix("GB")?.trim().parse().ok()?;
    (number > 0.0 && number < 1e7).then_some((number * 1e9) as u64)
}

impl FromStr for TargetMachine {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (gpus, host) = text.rsplit_once(',').ok_or(FORM)?;
        let (count, gpu) = match gpus.split_once(" x ") {
            Some((count, gpu)) => (count.trim().parse().map_err(|_| FORM)?, gpu.trim()),
            None => (1, gpus.trim()),
        };
        if !(1..=65536).contains(&count) {
            return Err(FORM.to_owned());
        }
        let known = GPUS.iter().find(|(name, _)| name.eq_ignore_ascii_case(gpu)).map(|(_, bytes)| *bytes);
        let names: Vec<&str> = GPUS.iter().map(|(name, _)| *name).collect();
        let gpu_bytes = known.or_else(|| bytes(gpu)).ok_or_else(|| {
            format!("no GPU {gpu:?}; known are {}, or write its memory, such as 80 GB", names.join(", "))
        })?;
        let host_bytes = bytes(host).ok_or(FORM)?;
        Ok(Self { gpus: count, gpu: gpu.to_owned(), gpu_bytes, host_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_read_and_a_wrong_one_is_answered() {
        let read = |text: &str| text.parse::<TargetMachine>();
        let eight = read("8 x H200, 1500 GB").unwrap();
        assert_eq!((eight.gpus, eight.gpu_memory().bytes), (8, 150_000_000_000));
        assert_eq!(eight.host_memory().bytes, 187_500_000_000);
        let one = read("80.5 GB,64GB").unwrap();
        assert_eq!(
            (one.gpus, one.gpu_memory().bytes, one.host_memory().bytes),
            (1, 80_500_000_000, 64_000_000_000)
        );
        for (text, said) in [
            ("H200", "write the GPUs and the host's memory"),
            ("8 x A100, 500 GB", "no GPU \"A100\"; known are H100,"),
            ("0 x H200, 500 GB", "write the GPUs"),
            ("x x H200, 500 GB", "write the GPUs"),
            ("H200, 500 GiB", "write the GPUs"),
        ] {
            assert!(read(text).unwrap_err().starts_with(said), "{text}");
        }
    }
}
