//! Metrics and their writers: JSON lines, TensorBoard, the console.
//!
//! ```text
//! Accumulator ─ finish ─> Metrics ─> Row ─┬─> MetricsFile   metrics.jsonl
//! Timings ─ take ───────────┘             ├─> TensorBoard   tensorboard/<phase>/events.out.tfevents.*
//!                                         └─> Progress      the terminal
//! ```

mod accumulator;
mod console;
mod eta;
mod jsonl;
mod row;
mod settings;
mod status;
mod table;
mod tensorboard;
mod terminal;
mod timings;
mod warnings;

pub use accumulator::Accumulator;
pub use console::{Console, Progress};
pub use eta::format_duration;
pub use jsonl::{MetricsFile, read_rows};
pub use row::{Metrics, Phase, Row};
pub use settings::LoggingSettings;
pub use status::current_stage;
pub use table::{TextTable, format_count, format_number};
pub use tensorboard::TensorBoard;
pub use terminal::{sanitize_line, sanitize_terminal};
pub use timings::{CLOCK, Timings};
pub use warnings::{WARNINGS_FILE, Warning, append_warning, read_warnings, warnings_text};
