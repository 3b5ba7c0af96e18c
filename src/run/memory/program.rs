//! Memory of the program without the model: code, tokenizer, threads, the Python tool's workers, and memory
//! that the allocator keeps. The constants are measured. docs/RELIABILITY.md names the runs.

use super::{MemoryItem, MemoryPlanInput, total_bytes};
use crate::interpreter::InterpreterKind;
use crate::vocabulary::Vocabulary;

const MIB: u64 = 1 << 20;
/// Memory of code, libraries, task data and trajectories.
const PROGRAM_BYTES: u64 = 48 * MIB;
/// Memory of a thread: the used part of its stack, and the blocks that the allocator keeps for it.
const THREAD_BYTES: u64 = MIB * 3 / 4;
/// Number of threads of every command: the first thread, the thread that runs the command, signals, console,
/// and the spawner of the tool's workers.
const COMMON_THREADS: usize = 5;
/// Memory of an idle worker of the embedded interpreter. The worker shares the program's code.
const EMBEDDED_WORKER_BYTES: u64 = 2 * MIB;
/// Memory of an idle worker of CPython, without preloaded modules.
const CPYTHON_WORKER_BYTES: u64 = 16 * MIB;
/// Memory per entry of the vocabulary while the tokenizer is read, including the merges. Most of it is freed
/// later, but in blocks that are too small for other uses.
const TOKENIZER_ENTRY_BYTES: u64 = 730;
/// Peak memory of reading a tokenizer, as a multiple of the file's size.
const TOKENIZER_FILE_FACTOR: u64 = 10;
/// Maximum memory that the allocator keeps for one phase and that other phases cannot use. The allocator
/// keeps blocks below 512 KiB by size and thread. Larger blocks return to its arena, which all phases use.
const RETAINED_BYTES_MAX: u64 = 256 * MIB;

/// Returns the memory that is needed while `vocabulary` is read.
pub fn tokenizer_bytes(vocabulary: &Vocabulary) -> u64 {
    TOKENIZER_ENTRY_BYTES * vocabulary.vocab_size() as u64
        + TOKENIZER_FILE_FACTOR * vocabulary.json_bytes().len() as u64
}

/// Returns the memory that the allocator still keeps from smaller phases while the largest one runs.
pub(super) fn retained_bytes(phases: &[(&str, Vec<MemoryItem>)]) -> u64 {
    let phase_bytes = || phases.iter().map(|(_, items)| total_bytes(items));
    (phase_bytes().sum::<u64>() - phase_bytes().max().unwrap_or(0)).min(RETAINED_BYTES_MAX)
}

impl MemoryPlanInput<'_> {
    /// Returns the memory of the program and of the tool's idle workers. Code that runs in a worker may use
    /// up to `interpreter.memory_mib` more.
    pub(super) fn program(&self) -> Vec<MemoryItem> {
        let calls = match self.tools.reply_chars_max {
            None => 0,
            Some(_) => self.recipe.rollout.tool_calls_concurrent_max.min(self.concurrent_sequences()),
        };
        // There is one pool of `threads` threads, and there are `threads` pools of one thread each. Each
        // sampling beside the update has as many again.
        let beside = if self.samples_beside_the_update() { self.samplings_in_flight() as usize } else { 0 };
        let threads = (COMMON_THREADS + 2 * self.threads * (1 + beside) + calls * beside.max(1)) as u64;
        let worker = match self.recipe.interpreter.kind {
            InterpreterKind::Embedded => EMBEDDED_WORKER_BYTES,
            InterpreterKind::CPython => CPYTHON_WORKER_BYTES,
        };
        vec![
            MemoryItem::new("program", PROGRAM_BYTES),
            MemoryItem::new("tokenizer", self.tokenizer_bytes),
            MemoryItem::new("threads", threads * THREAD_BYTES),
            MemoryItem::new("tool's workers, idle", self.tools.python_workers as u64 * worker),
        ]
    }
}
