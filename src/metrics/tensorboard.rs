//! TensorBoard event files with scalars: TFRecord frames around protobuf messages.
//!
//! Formats: `tensorflow/core/lib/io/record_writer.h` and `tensorflow/core/util/event.proto`.

use super::timings::{CLOCK, now};
use super::{Phase, Row};
use anyhow::{Context, Result};
use crc::{CRC_32_ISCSI, Crc};
use prost::Message;
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
        let scalars = row.metrics.iter().filter(|(tag, _)| *tag != CLOCK);
        let scalar = |(tag, value): (&str, f64)| Scalar { tag: tag.into(), simple_value: Some(value as f32) };
        let summary = Some(Summary { values: scalars.map(scalar).collect() });
        let event = Event { wall_time, step: row.step, summary, ..Event::default() };
        let written = self.file(row.phase)?.write_all(&frame(&event.encode_to_vec()));
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
    let version = Event { file_version: Some("brain.Event:2".into()), ..Event::default() };
    let start =
        purge.map(|step| Event { step, session_log: Some(SessionLog { status: START }), ..Event::default() });
    let events = [version].into_iter().chain(start);
    let head = events.flat_map(|event| frame(&Event { wall_time: now(), ..event }.encode_to_vec()));
    file.write_all(&head.collect::<Vec<u8>>())?;
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

/// An event has one of a version, scalars and a status.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(uint64, tag = "2")]
    step: u64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    /// Always written: a reader finds the kind of the value by it.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// The status of a session that starts.
const START: i32 = 1;
