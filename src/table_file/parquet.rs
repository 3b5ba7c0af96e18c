//! Rows of a Parquet file as JSON. A damaged file is an error: the library's panics are caught, and the
//! number of values is limited.

use super::{TableRow, TableRows};
use crate::bounded_file::DATA_BYTES_MAX;
use crate::panics::catch_panic;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use num_bigint::BigInt;
use parquet::data_type::Decimal;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::serialized_reader::ReadOptionsBuilder;
use parquet::record::Field;
use parquet::record::reader::RowIter;
use serde_json::{Map, Number, Value};
use std::io;

/// Maximum number of rows and of columns of a file. A damaged file may claim any number.
const ROWS_MAX: i64 = 100_000_000;
const COLUMNS_MAX: usize = 10_000;
/// Bytes that a value counts for besides its text, toward [`DATA_BYTES_MAX`].
const VALUE_BYTES: u64 = 16;

/// Opens the rows of the Parquet file in `bytes`.
///
/// # Errors
/// When the file's metadata is damaged, or has too many rows or columns.
pub(super) fn rows(bytes: Bytes) -> io::Result<TableRows> {
    let open = || -> Result<RowIter<'static>, String> {
        let options = ReadOptionsBuilder::new().build();
        let reader = SerializedFileReader::new_with_options(bytes, options).map_err(|e| e.to_string())?;
        let file = reader.metadata().file_metadata();
        let columns = file.schema_descr().num_columns();
        if !(0..=ROWS_MAX).contains(&file.num_rows()) || !(1..=COLUMNS_MAX).contains(&columns) {
            return Err(format!("{} rows and {columns} columns are claimed", file.num_rows()));
        }
        for group in reader.metadata().row_groups() {
            if !(0..=file.num_rows()).contains(&group.num_rows()) {
                return Err(format!("a row group with {} rows is claimed", group.num_rows()));
            }
        }
        Ok(RowIter::from_file_into(Box::new(reader)))
    };
    let mut rows = catch_panic(open).and_then(|rows| rows).map_err(damaged)?;
    let (mut number, mut bytes_left, mut has_ended) = (0, DATA_BYTES_MAX, false);
    Ok(Box::new(std::iter::from_fn(move || {
        if has_ended {
            return None;
        }
        let row = match catch_panic(|| rows.next()) {
            Ok(None) => return None,
            Ok(Some(row)) => row.map_err(|e| e.to_string()),
            Err(panic) => Err(panic),
        };
        number += 1;
        let row = row.and_then(|row| {
            let value = group(row.into_columns(), &mut bytes_left)?;
            Ok(TableRow { number, value: Ok(value) })
        });
        has_ended = row.is_err();
        Some(row.map_err(damaged))
    })))
}

fn damaged(reason: String) -> io::Error {
    io::Error::other(format!("this Parquet file cannot be read: {reason}; write it again"))
}

/// Returns a struct as a JSON object.
fn group(fields: Vec<(String, Field)>, bytes_left: &mut u64) -> Result<Value, String> {
    let mut values = Map::with_capacity(fields.len());
    for (name, field) in fields {
        values.insert(name, value(field, bytes_left)?);
    }
    Ok(Value::Object(values))
}

/// Returns a value as JSON. Decimals keep their digits. Dates and times are ISO 8601. Bytes that are no UTF-8
/// are base64. A number that is not finite is null, as `datasets` writes it.
fn value(field: Field, bytes_left: &mut u64) -> Result<Value, String> {
    let text_bytes = match &field {
        Field::Str(text) => text.len(),
        Field::Bytes(bytes) => bytes.len(),
        Field::Decimal(decimal) => decimal.data().len() * 3,
        _ => 0,
    } as u64;
    let too_large = || format!("its values take more than {} GiB", DATA_BYTES_MAX >> 30);
    *bytes_left = bytes_left.checked_sub(VALUE_BYTES + text_bytes).ok_or_else(too_large)?;
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(flag) => flag.into(),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float16(n) => float(f64::from(n)),
        // The shortest text of the same float, not that of its value in 64 bits.
        Field::Float(n) => n.to_string().parse().map_or(Value::Null, float),
        Field::Double(n) => float(n),
        Field::Decimal(n) => decimal(&n)?,
        Field::Str(text) => text.into(),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => BASE64_STANDARD.encode(bytes.data()).into(),
        },
        Field::Group(row) => group(row.into_columns(), bytes_left)?,
        Field::ListInternal(list) => {
            let values = list.elements().iter().map(|field| value(field.clone(), bytes_left));
            Value::Array(values.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut values = Map::new();
            for (key, field) in map.entries() {
                let key = match value(key.clone(), bytes_left)? {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                values.insert(key, value(field.clone(), bytes_left)?);
            }
            Value::Object(values)
        }
        time @ (Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_)) => time.to_string().into(),
    })
}

fn float(number: f64) -> Value {
    Number::from_f64(number).map_or(Value::Null, Value::Number)
}

/// Returns a decimal as a JSON number with all its digits.
fn decimal(decimal: &Decimal) -> Result<Value, String> {
    let (digits, scale) = (BigInt::from_signed_bytes_be(decimal.data()), decimal.scale());
    let wrong = || format!("a decimal with {scale} places");
    let scale = usize::try_from(scale).ok().filter(|scale| *scale <= 1000).ok_or_else(wrong)?;
    let (sign, digits) = match digits.sign() {
        num_bigint::Sign::Minus => ("-", digits.magnitude().to_string()),
        _ => ("", digits.to_string()),
    };
    let text = match scale {
        0 => digits,
        _ => {
            let digits = format!("{digits:0>width$}", width = scale + 1);
            let (whole, places) = digits.split_at(digits.len() - scale);
            format!("{whole}.{places}")
        }
    };
    let number: Number = format!("{sign}{text}").parse().map_err(|_| wrong())?;
    Ok(Value::Number(number))
}
