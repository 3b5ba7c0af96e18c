//! Rows of files of other programs: every writer's Parquet, CSV, arrays, gzip; damaged files; files of other
//! kinds. `scripts/make_reference_values.py tables` writes the fixtures.

use crate::cli::{in_repository, scratch};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rloss::table_file;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn folder() -> PathBuf {
    in_repository("tests/fixtures/tables")
}

fn rows(path: &Path) -> Result<Vec<Value>, String> {
    let rows = table_file::open(path).map_err(|e| e.to_string())?;
    rows.map(|row| row.map_err(|e| e.to_string())?.value).collect()
}

fn parquet_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "parquet")).collect();
    files.sort();
    files
}

#[test]
fn parquet_of_every_writer_has_equal_rows() {
    let expected = rows(&folder().join("rows.json")).unwrap();
    assert_eq!(expected.len(), 40);
    let mut read = 0;
    for file in parquet_files().iter().filter(|path| !path.ends_with("numbers.parquet")) {
        assert_eq!(rows(file).unwrap(), expected, "{}", file.display());
        read += 1;
    }
    assert_eq!(read, 11);
    for gzipped in ["rows.jsonl.gz", "gzipped.parquet.gz"] {
        assert_eq!(rows(&folder().join(gzipped)).unwrap(), expected, "{gzipped}");
    }
}

#[test]
fn decimals_and_large_integers_keep_their_digits() {
    let rows = rows(&folder().join("numbers.parquet")).unwrap();
    let texts: Vec<String> = rows.iter().map(Value::to_string).collect();
    assert_eq!(
        texts,
        [
            r#"{"d":1.20,"small":12.5,"u":18446744073709551615,"f":0.1,"b":"text","i8":-128}"#,
            r#"{"d":-0.05,"small":-3.0,"u":0,"f":null,"b":"/wA=","i8":127}"#,
            r#"{"d":null,"small":null,"u":null,"f":null,"b":null,"i8":null}"#,
        ]
    );
}

#[test]
fn csv_and_tsv_have_the_rows_of_the_table_as_texts() {
    let csv = rows(&folder().join("rows.csv")).unwrap();
    assert_eq!(
        (csv.len(), &csv[1]),
        (40, &json!({"data_source": "openai/gsm8k", "kind": "green", "n": "1"}))
    );
    assert_eq!(rows(&folder().join("rows.tsv")).unwrap(), csv);
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        rows(&folder.path().join(name))
    };
    assert_eq!(
        read("a.csv", "q,a\n\"x, \"\"y\"\"\nz\",4\n").unwrap(),
        [json!({"q": "x, \"y\"\nz", "a": "4"})]
    );
    assert!(read("b.csv", "q,a\n1\n").unwrap_err().starts_with("not CSV: "));
    assert!(read("c.csv", "q,q\n1,2\n").unwrap_err().contains("two columns are called \"q\""));
}

/// 10,000 by hand (`RLOSS_MUTATIONS=10000`); CI takes a tenth.
#[test]
fn damaged_parquet_files_are_errors_soon_and_without_a_panic() {
    let count = std::env::var("RLOSS_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let files: Vec<Vec<u8>> = parquet_files().iter().map(|path| std::fs::read(path).unwrap()).collect();
    let (_folder, [path]) = scratch(["damaged.parquet"]);
    let mut random = StdRng::seed_from_u64(84);
    let (mut errors, mut slowest) = (0, Duration::ZERO);
    for index in 0..count {
        let mut bytes = files[index % files.len()].clone();
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..4) {
            0 => bytes.truncate(at),
            1 => (0..5).for_each(|_| {
                let at = random.random_range(0..bytes.len());
                bytes[at] = random.random();
            }),
            2 => {
                // The metadata are at the end.
                let end = bytes.len();
                bytes[random.random_range(end - 1500..end - 8)] ^= 1 << random.random_range(0..8);
            }
            _ => drop(bytes.drain(at..(at + 20).min(files[index % files.len()].len()))),
        }
        if bytes.len() > 8 {
            bytes[..4].copy_from_slice(b"PAR1");
            let end = bytes.len();
            bytes[end - 4..].copy_from_slice(b"PAR1");
        }
        std::fs::write(&path, &bytes).unwrap();
        let start = Instant::now();
        errors += usize::from(rows(&path).is_err());
        slowest = slowest.max(start.elapsed());
    }
    assert!(errors > count / 2 && slowest < Duration::from_secs(10), "{errors} errors, {slowest:?}");
}

/// F1: 590 lines of "not JSON" were said of a Parquet file.
#[test]
fn bug_f1_a_file_of_another_kind_is_named_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (name, bytes, said) in [
        (
            "a.arrow",
            &b"ARROW1\0\0 and more"[..],
            "this is an Arrow file; save its rows as Parquet or JSON lines",
        ),
        ("a.zip", b"PK\x03\x04....", "this is a ZIP archive; unpack it"),
        ("a.zst", b"\x28\xb5\x2f\xfd....", "this is compressed with zstd"),
        ("a.jsonl.gz", b"{\"a\": 1}\n", "but the file is not gzipped"),
        ("a.parquet", b"PAR1 cut", "this Parquet file cannot be read: "),
    ] {
        std::fs::write(path(name), bytes).unwrap();
        let error = rows(&path(name)).unwrap_err();
        assert!(error.contains(said), "{name}: {error}");
    }
    std::fs::write(path("words.txt"), "no\nJSON\nat\nall\n".repeat(150)).unwrap();
    let read = rloss::tasks::rows::read(&path("words.txt"), None, "{}", |_| Ok(()));
    let error = read.unwrap_err().to_string();
    assert!(error.contains("this is no file of JSON lines, a JSON array, CSV or Parquet: row 1"), "{error}");
    assert!(error.len() < 300, "{error}");
}

#[test]
fn a_pattern_names_several_files_in_order_and_their_rows_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in
        [("b.jsonl", "{\"n\": 2}\n"), ("a.json", "[{\"n\": 1}, {}]"), ("c.txt", "{\"n\": 3}\n")]
    {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let read = |pattern: &str| {
        let number = |row: &Value| row["n"].as_u64().ok_or_else(|| "no number".to_owned());
        rloss::tasks::rows::read(&folder.path().join(pattern), None, "{}", number).map_err(|e| e.to_string())
    };
    let error = read("?.json*").unwrap_err();
    assert!(error.contains("row 2 of a.json: no number"), "{error}");
    std::fs::write(folder.path().join("a.json"), "[{\"n\": 1}]").unwrap();
    assert_eq!(read("?.json*").unwrap(), [1, 2]);
    assert!(read("*.csv").unwrap_err().contains("no file matches *.csv"));
}
