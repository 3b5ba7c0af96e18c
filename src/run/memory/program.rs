//! Memory of the program beside the model: code, tokenizer, threads, the Python tool's workers, and what the
//! allocator keeps. The constants are measured; docs/RELIABILITY.md names the runs.

use super::{MemoryItem, PlanInput, sum};
use crate::interpreter::InterpreterKind;
use crate::vocabulary::Vocabulary;

const MIB: u64 = 1 << 20;
/// Code, libraries, task data and trajectories.
const PROGRAM_BYTES: u64 = 48 * MIB;
/// The used stack of a thread, and the blocks that the allocator holds for it.
const THREAD_BYTES: u64 = MIB * 3 / 4;
/// Threads that every command starts: main, signals, console, and the spawner of the tool's workers.
const COMMON_THREADS: usize = 5;
/// A worker of the embedded interpreter at rest. It shares the program's code.
const EMBEDDED_WORKER_BYTES: u64 = 2 * MIB;
/// A worker of CPython at rest, without preloaded modules.
const CPYTHON_WORKER_BYTES: u64 = 16 * MIB;
/// An entry of the vocabulary with its merges, while the tokenizer is read. Most of it is freed, in parts too
/// small for other use.
const TOKENIZER_ENTRY_BYTES: u64 = 730;
/// Memory of a tokenizer for each byte of its file, while it is read.
const TOKENIZER_FILE_FACTOR: u64 = 10;
/// Limit of what the allocator keeps. It keeps blocks below 512 KiB by size and thread; larger ones return to
/// its arena, where all phases find them.
const RETAINED_BYTES_MAX: u64 = 256 * MIB;

/// Returns the memory that reading `vocabulary` takes.
pub fn tokenizer_bytes(vocabulary: &Vocabulary) -> u64 {
    TOKENIZER_ENTRY_BYTES * vocabulary.vocab_size() as u64
        + TOKENIZER_FILE_FACTOR * vocabulary.json_bytes().len() as u64
}

/// Returns the memory that the allocator keeps of all phases except the largest, which does not reuse it.
pub(super) fn retained_bytes(phases: &[(&str, Vec<MemoryItem>)]) -> u64 {
    let of_phases = || phases.iter().map(|(_, parts)| sum(parts));
    (of_phases().sum::<u64>() - of_phases().max().unwrap_or(0)).min(RETAINED_BYTES_MAX)
}

impl PlanInput<'_> {
    /// Returns the memory of the program and of the tool's workers at rest. Code in a worker may use up to
    /// `interpreter.memory_mib` more.
    pub(super) fn program(&self) -> Vec<MemoryItem> {
        let calls = match self.python_workers {
            0 => 0,
            _ => self.recipe.rollout.tool_calls_concurrent_max.min(self.concurrent_sequences()),
        };
        // One pool with all threads, and as many pools of one thread.
        let threads = (COMMON_THREADS + 2 * self.threads + calls) as u64;
        let worker = match self.recipe.interpreter.kind {
            InterpreterKind::Embedded => EMBEDDED_WORKER_BYTES,
            InterpreterKind::CPython => CPYTHON_WORKER_BYTES,
        };
        vec![
            MemoryItem { name: "program", bytes: PROGRAM_BYTES },
            MemoryItem { name: "tokenizer", bytes: self.tokenizer_bytes },
            MemoryItem { name: "threads", bytes: threads * THREAD_BYTES },
            MemoryItem { name: "tool's workers, idle", bytes: self.python_workers as u64 * worker },
        ]
    }
}
