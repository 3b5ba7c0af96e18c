//! TensorBoard event files with scalars: TFRecord frames around protobuf messages that are encoded here.
//!
//! Formats: `tensorflow/core/lib/io/record_writer.h` and `tensorflow/core/util/event.proto`.

use super::timings::{CLOCK, now};
use super::{Phase, Row};
use anyhow::{Context, Result};
use crc::{CRC_32_ISCSI, Crc};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes rows as scalars with x = step. Each phase has a subfolder, which TensorBoard shows as one run.
///
/// A resumed run starts a new file. The first event of that file names the first step after the checkpoint.
/// TensorBoard then drops the events of earlier files from that step on, so no step appears twice.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    files: BTreeMap<Phase, File>,
    /// For a resumed run: for each phase, the first step whose events in earlier files are dropped.
    purge: BTreeMap<Phase, u64>,
}

impl TensorBoard {
    /// Writes under `folder`. The first row creates the folder.
    pub fn create(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), files: BTreeMap::new(), purge: BTreeMap::new() }
    }

    /// Continues a run. `kept` are the valid rows of the run: those before the checkpoint.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn resume(folder: &Path, kept: &[Row]) -> Result<Self> {
        let mut board = Self::create(folder);
        for &phase in Phase::ALL {
            let last = kept.iter().filter(|row| row.phase == phase).map(|row| row.step).max();
            board.purge.insert(phase, last.map_or(0, |step| step + 1));
            if folder.join(phase.name()).is_dir() {
                board.file(phase)?;
            }
        }
        Ok(board)
    }

    /// Appends the row's metrics as one event. Values are stored as `f32`, as TensorBoard does.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, row: &Row) -> Result<()> {
        let folder = self.folder.clone();
        let wall_time = row.metrics.get(CLOCK).unwrap_or_else(now);
        let event = Event { wall_time, step: row.step, what: EventPayload::Scalars(row) };
        let written = self.file(row.phase)?.write_all(&frame(&event.encode()));
        written.with_context(|| format!("{}: TensorBoard events cannot be written", folder.display()))
    }

    fn file(&mut self, phase: Phase) -> Result<&mut File> {
        if !self.files.contains_key(&phase) {
            let folder = self.folder.join(phase.name());
            let file = start_file(&folder, self.purge.get(&phase).copied());
            let file =
                file.with_context(|| format!("{}: TensorBoard events cannot be written", folder.display()))?;
            self.files.insert(phase, file);
        }
        self.files.get_mut(&phase).context("the file was just inserted")
    }
}

/// Creates an event file in `folder`. TensorBoard reads the files of a folder in the order of their names. So
/// the name has a number in place of the usual timestamp.
fn start_file(folder: &Path, purge: Option<u64>) -> Result<File> {
    std::fs::create_dir_all(folder)?;
    let mut number = 0;
    let mut file = loop {
        let path = folder.join(format!("events.out.tfevents.{number:010}.rloss"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
            opened => break opened?,
        }
    };
    let mut head = frame(&Event { wall_time: now(), step: 0, what: EventPayload::FileVersion }.encode());
    if let Some(step) = purge {
        head.extend(frame(&Event { wall_time: now(), step, what: EventPayload::SessionStart }.encode()));
    }
    file.write_all(&head)?;
    Ok(file)
}

/// Returns one TFRecord: length, masked CRC of the length, data, masked CRC of the data, all little-endian.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

/// Returns the CRC-32C in TFRecord's masked form: rotated by 15 bits, plus a constant. TFRecord masks CRCs,
/// because the data may itself contain CRCs.
fn masked_crc(data: &[u8]) -> u32 {
    const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
    CRC32C.checksum(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// `message Event { double wall_time = 1; int64 step = 2; oneof what { string file_version = 3;
/// Summary summary = 5; SessionLog session_log = 7; } }`
struct Event<'a> {
    wall_time: f64,
    step: u64,
    what: EventPayload<'a>,
}

enum EventPayload<'a> {
    FileVersion,
    /// `message SessionLog { SessionStatus status = 1; }` with START = 1.
    SessionStart,
    /// `message Summary { repeated Value value = 1; }`,
    /// `message Value { string tag = 1; float simple_value = 2; }`
    Scalars(&'a Row),
}

impl Event<'_> {
    fn encode(&self) -> Vec<u8> {
        let mut event = vec![1 << 3 | FIXED64];
        event.extend(self.wall_time.to_le_bytes());
        event.push(2 << 3 | VARINT);
        varint(&mut event, self.step);
        match self.what {
            EventPayload::FileVersion => bytes_field(&mut event, 3, b"brain.Event:2"),
            EventPayload::SessionStart => bytes_field(&mut event, 7, &[1 << 3 | VARINT, 1]),
            EventPayload::Scalars(row) => {
                let mut summary = Vec::new();
                for (tag, value) in row.metrics.iter().filter(|(tag, _)| *tag != CLOCK) {
                    let mut scalar = Vec::new();
                    bytes_field(&mut scalar, 1, tag.as_bytes());
                    scalar.push(2 << 3 | FIXED32);
                    scalar.extend((value as f32).to_le_bytes());
                    bytes_field(&mut summary, 1, &scalar);
                }
                bytes_field(&mut event, 5, &summary);
            }
        }
        event
    }
}

/// Protobuf wire types.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

fn bytes_field(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}
