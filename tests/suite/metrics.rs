//! Metrics: exact round trips, cutting back, TensorBoard framing, harmless text.

use crate::cli::scratch;
use rloss::error::BadInput;
use rloss::metrics::{
    Accumulator, CLOCK, MetricsFile, Phase, Row, TensorBoard, TextTable, Timings, format_number, read_rows,
    sanitize_line, sanitize_terminal,
};
use rloss::random::{Purpose, stream};
use std::path::{Path, PathBuf};

fn row(step: u64, phase: Phase, metrics: &[(&str, f64)]) -> Row {
    Row { step, phase, metrics: metrics.iter().copied().collect() }
}

fn is_bad_input(error: &anyhow::Error) -> bool {
    error.downcast_ref::<BadInput>().is_some()
}

#[test]
fn every_f64_reads_back_with_the_same_bits() {
    use rand::RngCore;
    let mut random = stream(7, Purpose::Problem, &[]);
    let edges = [
        0.0,
        -0.0,
        1.0,
        -3.0,
        0.1,
        1.0 / 3.0,
        f64::MIN_POSITIVE,
        5e-324,
        f64::MAX,
        f64::MIN,
        9_007_199_254_740_992.0,
        -9_007_199_254_740_994.0,
        1e21,
        f64::INFINITY,
        f64::NEG_INFINITY,
    ];
    let drawn = (0..20_000).map(|_| f64::from_bits(random.next_u64())).filter(|x| !x.is_nan());
    for value in edges.into_iter().chain(drawn) {
        let line = row(1, Phase::Rl, &[("x", value)]).to_json();
        let back = Row::from_json(&line).unwrap().metrics.get("x").unwrap();
        assert_eq!(back.to_bits(), value.to_bits(), "{line}");
    }
    let nan = row(1, Phase::Rl, &[("x", f64::NAN)]).to_json();
    assert!(Row::from_json(&nan).unwrap().metrics.get("x").unwrap().is_nan());
}

#[test]
fn a_row_is_plain_json_ordered_by_name() {
    let metrics = [("b", 2.0), ("a/\"q\"", -0.5), ("z", f64::NAN), ("c", f64::NEG_INFINITY)];
    assert_eq!(
        row(12, Phase::SftWarmUp, &metrics).to_json(),
        r#"{"step":12,"phase":"cold_start","a/\"q\"":-0.5,"b":2,"c":"-Infinity","z":"NaN"}"#
    );
}

#[test]
fn a_line_that_is_no_row_says_why() {
    for (line, why) in [
        ("[1]", "not a JSON object"),
        (r#"{"phase":"rl"}"#, "`step` is missing"),
        (r#"{"step":-1,"phase":"rl"}"#, "`step` is missing or not a whole number"),
        (r#"{"step":1}"#, "`phase` is missing"),
        (r#"{"step":1,"phase":"warm"}"#, "`phase` is not one of"),
        (r#"{"step":1,"phase":"rl","loss":"low"}"#, "`loss` is not a number: \"low\""),
        (r#"{"step":1,"phase":"rl","loss":null}"#, "`loss` is not a number: null"),
    ] {
        let error = Row::from_json(line).unwrap_err();
        assert!(error.contains(why), "{line}: {error}");
    }
}

#[test]
fn a_resumed_file_equals_one_that_was_never_cut() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Row> = (1..=6).map(|i| row(i, Phase::Rl, &[("reward", 1.0 / i as f64)])).collect();
    let (whole, cut) = (folder.path().join("whole.jsonl"), folder.path().join("cut.jsonl"));
    let mut file = MetricsFile::create(&whole).unwrap();
    rows.iter().for_each(|r| file.write(r).unwrap());

    let mut file = MetricsFile::create(&cut).unwrap();
    rows[..3].iter().for_each(|r| file.write(r).unwrap());
    let bytes = file.sync().unwrap();
    rows[3..5].iter().for_each(|r| file.write(r).unwrap());
    drop(file);
    append(&cut, br#"{"step":6,"phase":"rl","rew"#);
    assert_eq!(read_rows(&cut).unwrap(), rows[..5], "the torn line is left out");

    let mut file = MetricsFile::resume(&cut, bytes).unwrap();
    assert_eq!(read_rows(&cut).unwrap(), rows[..3]);
    rows[3..].iter().for_each(|r| file.write(r).unwrap());
    assert_eq!(file.sync().unwrap(), std::fs::metadata(&whole).unwrap().len());
    assert_eq!(std::fs::read(&cut).unwrap(), std::fs::read(&whole).unwrap());
}

#[test]
fn metrics_are_neither_overwritten_nor_cut_at_a_wrong_place() {
    let (_folder, [path]) = scratch(["metrics.jsonl"]);
    let mut file = MetricsFile::create(&path).unwrap();
    file.write(&row(1, Phase::Rl, &[("x", 1.5)])).unwrap();
    let bytes = file.sync().unwrap();
    let before = std::fs::read(&path).unwrap();
    for error in [
        MetricsFile::create(&path).unwrap_err(),
        MetricsFile::resume(&path, bytes + 1).unwrap_err(),
        MetricsFile::resume(&path, bytes - 1).unwrap_err(),
    ] {
        assert!(is_bad_input(&error) && error.to_string().contains("metrics.jsonl"), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    MetricsFile::resume(&path, 0).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"");
}

#[test]
fn a_broken_line_names_file_and_line() {
    let (_folder, [path]) = scratch(["metrics.jsonl"]);
    std::fs::write(&path, "{\"step\":1,\"phase\":\"rl\"}\n{\"step\":2,\n{\"step\":3,\"phase\":\"rl\"}")
        .unwrap();
    let error = read_rows(&path).unwrap_err();
    assert!(is_bad_input(&error) && error.to_string().contains("metrics.jsonl: line 2: "), "{error}");
    std::fs::write(&path, "{\"step\":1,\"phase\":\"rl\"}\n{\"step\":3,\"phase\":\"rl\"}").unwrap();
    assert_eq!(read_rows(&path).unwrap().len(), 2, "a whole last row counts without its line feed");
    std::fs::write(&path, b"{\"step\":1,\"phase\":\"rl\",\"\xff\":1}\n").unwrap();
    assert!(is_bad_input(&read_rows(&path).unwrap_err()));
}

/// In every build: neither of two reductions may win in silence.
#[test]
fn conflicting_reductions_of_one_metric_are_an_error() {
    let mut step = Accumulator::new();
    step.mean("actor/entropy", 2.0, 3.0);
    step.sum("outcome/finished", 1.0);
    step.max("outcome/finished", 4.0);
    let error = step.finish().unwrap_err().to_string();
    assert!(error.contains("outcome/finished") && !error.contains("actor/entropy"), "{error}");
}

#[test]
fn reductions_over_pieces() {
    let mut one = Accumulator::new();
    one.mean("mean", 2.0, 3.0);
    one.sum("sum", 2.0);
    one.max("max", -1.0);
    one.min("min", 4.0);
    one.max("nan", f64::NAN);
    for value in [1.0, 3.0] {
        one.deviation("deviation", value);
        one.deviation("nan deviation", value * f64::NAN);
    }
    one.deviation("one value", 5.0);
    one.mean("mean", 6.0, 1.0);
    one.sum("sum", 0.5);
    one.max("max", -3.0);
    one.min("min", 5.0);
    one.max("nan", 1.0);
    one.mean("nothing", 1.0, 0.0);
    let metrics = one.finish().unwrap();
    for (name, value) in [
        ("mean", 3.0),
        ("sum", 2.5),
        ("max", -1.0),
        ("min", 4.0),
        ("deviation", 2f64.sqrt()),
        ("one value", 0.0),
    ] {
        assert_eq!(metrics.get(name), Some(value), "{name}");
    }
    for name in ["nan", "nan deviation", "nothing"] {
        assert!(metrics.get(name).unwrap().is_nan(), "{name}");
    }
}

#[test]
fn timings_add_up_nest_and_start_again() {
    let timings = Timings::new();
    timings.add("gen", 1.0);
    timings.add("gen", 0.5);
    let failed: Result<(), &str> = timings.time("step", || timings.time("reward", || Err("kept")));
    assert_eq!(failed, Err("kept"));
    let metrics = timings.take();
    let names: Vec<&str> = metrics.iter().map(|(name, _)| name).collect();
    assert_eq!(names, [CLOCK, "timing_s/gen", "timing_s/reward", "timing_s/step"]);
    assert_eq!(metrics.get("timing_s/gen"), Some(1.5));
    assert!(metrics.get("timing_s/step") >= metrics.get("timing_s/reward"));
    assert_eq!(timings.take().iter().map(|(name, _)| name).collect::<Vec<_>>(), [CLOCK]);
}

#[test]
fn text_becomes_harmless_and_stays_readable() {
    let hostile = "a\u{1b}[31m\r\u{7}\u{7f}\u{9b}2J\u{202e}\u{200b}é\tb\nc";
    assert_eq!(sanitize_terminal(hostile), "a␛[31m␍␇␡\\u{9b}2J\\u{202e}\\u{200b}é\tb\nc");
    assert_eq!(sanitize_line("b\tc\n"), "b␉c␊");
    for c in (0..=0x10ffffu32).filter_map(char::from_u32).filter(|c| c.is_control()) {
        assert!(!sanitize_line(&c.to_string()).contains(char::is_control), "{c:?}");
    }
}

#[test]
fn tables_align_numbers_right_and_names_left() {
    let mut table = TextTable::new(["name", "gap", "share"]);
    table.add_row(["日本", "0.25", "5%"]);
    table.add_row(["x\u{1b}", "-12", ""]);
    let text = table.to_string();
    assert_eq!(text, "name   gap  share\n────  ────  ─────\n日本  0.25     5%\nx␛     -12\n");
}

#[test]
fn columns_without_room_go_below_after_the_first_one_again() {
    let mut table = TextTable::new(["arm", "largest gap", "mean"]);
    table.add_row(["sinks", "0.25", "0.125"]);
    let folded = "arm    largest gap\n─────  ───────────\nsinks         0.25\n\narm     mean\n─────  ─────\nsinks  0.125\n";
    assert_eq!(table.format_within(18), folded);
    assert_eq!(table.format_within(80), table.to_string());
}

#[test]
fn numbers_for_people_keep_four_digits() {
    for (value, text) in [
        (0.0, "0"),
        (-0.25, "-0.25"),
        (1.0 / 3.0, "0.3333"),
        (2.0 / 3000.0, "6.667e-4"),
        (123.456, "123.5"),
        (1_064.6, "1,065"),
        (18_240.4, "18,240"),
        (-1_234_567.0, "-1,234,567"),
        (1.5e12, "1.5e12"),
        (1e-7, "1e-7"),
        (f64::NAN, "NaN"),
        (f64::NEG_INFINITY, "-∞"),
    ] {
        assert_eq!(format_number(value), text);
    }
}

#[test]
fn tensorboard_frames_hold_their_checksums_and_scalars() {
    let folder = tempfile::tempdir().unwrap();
    let mut board = TensorBoard::create(folder.path());
    board.write(&row(300, Phase::Rl, &[("critic/rewards/mean", -0.5), ("nan", f64::NAN)])).unwrap();
    board.write(&row(1, Phase::Eval, &[("val-core/a/acc/mean@1", 0.25)])).unwrap();
    let files = event_files(&folder.path().join("rl"));
    assert_eq!(files.len(), 1);
    let events = decode_file(&files[0]);
    assert_eq!(events[0].version.as_deref(), Some("brain.Event:2"));
    assert_eq!(events[1].step, 300);
    assert_eq!(events[1].scalars[0], ("critic/rewards/mean".to_owned(), -0.5));
    assert!(events[1].scalars[1].1.is_nan());
    assert!(events.iter().all(|e| e.wall_time > 1.6e9 && !e.session_start));
    let eval = decode_file(&event_files(&folder.path().join("eval"))[0]);
    assert_eq!((eval[1].step, eval[1].scalars.len()), (1, 1));
}

#[test]
fn a_resumed_run_tells_tensorboard_what_to_drop() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Row> = (1..=5).map(|i| row(i, Phase::Rl, &[("x", i as f64)])).collect();
    let mut board = TensorBoard::create(folder.path());
    rows.iter().for_each(|r| board.write(r).unwrap());
    let mut board = TensorBoard::resume(folder.path(), &rows[..3]).unwrap();
    rows[3..].iter().for_each(|r| board.write(r).unwrap());
    board.write(&row(4, Phase::Eval, &[("y", 1.0)])).unwrap();
    let files = event_files(&folder.path().join("rl"));
    assert_eq!(files.len(), 2);
    let resumed = decode_file(&files[1]);
    assert!(resumed[1].session_start && resumed[1].step == 4);
    assert_eq!(resumed[2..].iter().map(|e| e.step).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(event_files(&folder.path().join("eval")).len(), 1);
}

fn append(path: &Path, bytes: &[u8]) {
    use std::io::Write;
    std::fs::OpenOptions::new().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

fn event_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// What a reader of the format sees in one event; written against the format, not against the writer.
#[derive(Debug, Default)]
struct Decoded {
    wall_time: f64,
    step: u64,
    version: Option<String>,
    session_start: bool,
    scalars: Vec<(String, f32)>,
}

fn decode_file(path: &Path) -> Vec<Decoded> {
    assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
    assert_eq!(crc32c(b"123456789"), 0xe306_9283, "the published check value of CRC-32C");
    let masked = |data: &[u8]| {
        let crc = crc32c(data);
        crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
    };
    let bytes = std::fs::read(path).unwrap();
    let (mut rest, mut events) = (bytes.as_slice(), Vec::new());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(rest[8..12], masked(&rest[..8]));
        let data = &rest[12..12 + length];
        assert_eq!(rest[12 + length..16 + length], masked(data));
        events.push(decode_event(data));
        rest = &rest[16 + length..];
    }
    events
}

fn decode_event(data: &[u8]) -> Decoded {
    let mut event = Decoded::default();
    for (field, value) in fields(data) {
        match field {
            1 => event.wall_time = f64::from_le_bytes(value.try_into().unwrap()),
            2 => event.step = read_varint(&mut &value[..]),
            3 => event.version = Some(String::from_utf8(value.to_vec()).unwrap()),
            5 => event.scalars = fields(value).into_iter().map(|(_, v)| decode_scalar(v)).collect(),
            7 => event.session_start = fields(value) == [(1, &[1u8][..])],
            other => panic!("field {other}"),
        }
    }
    event
}

fn decode_scalar(value: &[u8]) -> (String, f32) {
    let parts = fields(value);
    assert_eq!((parts[0].0, parts[1].0), (1, 2));
    (String::from_utf8(parts[0].1.to_vec()).unwrap(), f32::from_le_bytes(parts[1].1.try_into().unwrap()))
}

/// A protobuf message as (field number, bytes of the value).
fn fields(mut data: &[u8]) -> Vec<(u64, &[u8])> {
    let mut found = Vec::new();
    while !data.is_empty() {
        let key = read_varint(&mut data);
        let length = match key & 7 {
            0 => data.iter().position(|b| b & 0x80 == 0).unwrap() + 1,
            1 => 8,
            2 => read_varint(&mut data) as usize,
            5 => 4,
            wire => panic!("wire type {wire}"),
        };
        found.push((key >> 3, &data[..length]));
        data = &data[length..];
    }
    found
}

fn read_varint(data: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = data[0];
        *data = &data[1..];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return value;
        }
    }
    unreachable!()
}

/// Bit by bit from the polynomial (reflected 0x1EDC6F41).
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |c: u32, _| (c >> 1) ^ (0x82f6_3b78 & (c & 1).wrapping_neg()))
    })
}
