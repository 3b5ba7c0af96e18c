//! Rows of data files: JSON lines, JSON arrays, CSV and Parquet, gzipped or not. The content decides the
//! kind. CSV alone is known by its name.

mod parquet;

use crate::bounded_file::{self, DATA_BYTES_MAX, LINE_BYTES_MAX, ROWS_BYTES_MAX};
use flate2::read::MultiGzDecoder;
use serde_json::{Map, Value};
use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read};
use std::path::{Path, PathBuf};
use wildmatch::WildMatch;

/// A row and its number in the file, from 1. A row of JSON lines has the number of its line.
pub struct TableRow {
    pub number: usize,
    /// The row, or its mistake.
    pub value: Result<Value, String>,
}

/// The rows of a file. After an error the iterator ends.
pub type TableRows = Box<dyn Iterator<Item = io::Result<TableRow>>>;

/// The kind of a file's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    JsonLines,
    JsonArray,
    /// Values separated by the byte.
    Csv(u8),
    Parquet,
}

/// The first bytes of files of other kinds, the kind's name, and the remedy.
const OTHER_KINDS: [(&[u8], &str, &str); 11] = [
    (b"ARROW1", "an Arrow file", SAVE_PARQUET),
    (b"\xff\xff\xff\xff", "an Arrow stream, as `datasets` keeps in its cache", SAVE_PARQUET),
    (b"ORC", "an ORC file", SAVE_PARQUET),
    (b"Obj\x01", "an Avro file", SAVE_PARQUET),
    (b"\x89HDF", "an HDF5 file", SAVE_PARQUET),
    (b"SQLite format 3", "an SQLite database", SAVE_PARQUET),
    (b"\x80\x04", "a pickle", SAVE_PARQUET),
    (b"\x93NUMPY", "a NumPy file", SAVE_PARQUET),
    (b"PK\x03\x04", "a ZIP archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", UNPACK),
    (b"\xfd7zXZ", "compressed with xz", UNPACK),
];
const SAVE_PARQUET: &str = "save its rows as Parquet or JSON lines";
const UNPACK: &str = "unpack it; only gzip is read";

/// Bytes that decide the kind of a file.
const HEAD_BYTES: usize = 64;

/// Returns the files that `path` names: itself, or, if the file's name has `*` or `?` and no such file
/// exists, the matching files of its folder by name.
///
/// # Errors
/// When the folder cannot be read, or no file matches.
pub fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !name.contains(['*', '?']) || path.exists() {
        return Ok(vec![path.to_owned()]);
    }
    let pattern = WildMatch::new(&name);
    let folder = path.parent().unwrap_or(Path::new(""));
    let entries = std::fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let matches = |file: &PathBuf| {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        pattern.matches(&name) && file.is_file()
    };
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(matches).collect();
    files.sort();
    match files.is_empty() {
        true => Err(io::Error::new(ErrorKind::NotFound, format!("no file matches {name}"))),
        false => Ok(files),
    }
}

/// Opens the rows of a file.
///
/// # Errors
/// When the file cannot be read, is too large, or is of another kind, which the error names.
pub fn open(path: &Path) -> io::Result<TableRows> {
    let mut file = BufReader::new(bounded_file::open(path, DATA_BYTES_MAX)?);
    let is_gzipped = head(&mut file)?.starts_with(b"\x1f\x8b");
    if !is_gzipped && path.extension().is_some_and(|end| end == "gz") && !head(&mut file)?.is_empty() {
        return Err(io::Error::other("the name ends in .gz, but the file is not gzipped; rename it"));
    }
    let mut text: Box<dyn BufRead> =
        if is_gzipped { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
    let kind = kind(head(&mut text)?, path)?;
    Ok(match kind {
        Kind::JsonLines => Box::new(json_lines(text)),
        Kind::JsonArray => Box::new(json_array(text)?),
        Kind::Csv(separator) => Box::new(csv_rows(text, separator)?),
        Kind::Parquet => parquet::rows(read_whole(text)?.into())?,
    })
}

/// Returns the first bytes of `from`, which stay unread.
fn head(from: &mut impl BufRead) -> io::Result<&[u8]> {
    let bytes = from.fill_buf()?;
    Ok(bytes.get(..HEAD_BYTES).unwrap_or(bytes))
}

fn kind(head: &[u8], path: &Path) -> io::Result<Kind> {
    if head.starts_with(b"PAR1") {
        return Ok(Kind::Parquet);
    }
    if let Some((_, name, remedy)) = OTHER_KINDS.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return Err(io::Error::other(format!("this is {name}; {remedy}")));
    }
    let text = head.strip_prefix("\u{feff}".as_bytes()).unwrap_or(head).trim_ascii_start();
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    Ok(match text.first() {
        Some(b'[') => Kind::JsonArray,
        Some(b'{') => Kind::JsonLines,
        _ if name.ends_with(".csv") => Kind::Csv(b','),
        _ if name.ends_with(".tsv") => Kind::Csv(b'\t'),
        _ => Kind::JsonLines,
    })
}

/// Reads all of `from`, at most [`ROWS_BYTES_MAX`].
fn read_whole(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    from.take(ROWS_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > ROWS_BYTES_MAX { Err(too_large()) } else { Ok(bytes) }
}

fn too_large() -> io::Error {
    let limit = ROWS_BYTES_MAX >> 30;
    io::Error::new(
        ErrorKind::FileTooLarge,
        format!("larger than {limit} GiB; split it, and name all parts by *"),
    )
}

/// Returns the rows of JSON lines. Blank lines are left out.
fn json_lines(text: impl BufRead) -> impl Iterator<Item = io::Result<TableRow>> {
    bounded_file::lines(text).enumerate().filter_map(|(i, line)| {
        let line = match line {
            Ok(line) if line.trim_ascii().is_empty() => return None,
            Ok(line) => line,
            Err(e) => return Some(Err(e)),
        };
        // A byte order mark is no part of the text (RFC 8259, section 8.1).
        let text = line.strip_prefix("\u{feff}".as_bytes()).filter(|_| i == 0).unwrap_or(&line);
        let value = serde_json::from_slice(text).map_err(|e| not_json(text, &e));
        Some(Ok(TableRow { number: i + 1, value }))
    })
}

/// Returns why `text` is not JSON, and the remedy for what other programs write.
fn not_json(text: &[u8], error: &serde_json::Error) -> String {
    let contains = |word: &str| text.windows(word.len()).any(|bytes| bytes == word.as_bytes());
    let remedy = if text.contains(&0) || text.starts_with(b"\xff\xfe") || text.starts_with(b"\xfe\xff") {
        "; the file seems to be UTF-16: save it as UTF-8"
    } else if error.to_string().contains("surrogate") {
        "; an escape such as \\ud83d is half a character: write both halves, or the character itself"
    } else if ["NaN", "Infinity"].into_iter().any(contains) {
        "; JSON has no NaN and no Infinity: write null"
    } else {
        ""
    };
    format!("not JSON: {error}{remedy}")
}

/// Returns the rows of a JSON array, which is read as a whole.
fn json_array(text: impl Read) -> io::Result<impl Iterator<Item = io::Result<TableRow>>> {
    let bytes = read_whole(text)?;
    let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
    let values: Vec<Value> =
        serde_json::from_slice(bytes).map_err(|e| io::Error::other(not_json(bytes, &e)))?;
    Ok(values.into_iter().zip(1..).map(|(value, number)| Ok(TableRow { number, value: Ok(value) })))
}

/// Returns the rows of a table whose first line has the columns' names. Every value is a text.
fn csv_rows(text: impl Read, separator: u8) -> io::Result<impl Iterator<Item = io::Result<TableRow>>> {
    let bytes = Cursor::new(read_whole(text)?);
    let mut reader = csv::ReaderBuilder::new().delimiter(separator).flexible(false).from_reader(bytes);
    let names: Vec<String> = reader.headers().map_err(io::Error::other)?.iter().map(str::to_owned).collect();
    if let Some(name) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
        return Err(io::Error::other(format!("two columns are called {:?}; rename one", name.1)));
    }
    Ok(reader.into_records().zip(1..).map(move |(record, number)| {
        let value = match record {
            Ok(record) if record.as_slice().len() as u64 > LINE_BYTES_MAX => {
                let limit = LINE_BYTES_MAX >> 20;
                Err(format!("longer than {limit} MiB; a quote (\") may have no end"))
            }
            Ok(record) => {
                let values = record.iter().map(Value::from);
                Ok(Value::Object(names.iter().cloned().zip(values).collect::<Map<_, _>>()))
            }
            Err(e) => Err(format!("not CSV: {e}")),
        };
        Ok(TableRow { number, value })
    }))
}
