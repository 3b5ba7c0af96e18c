#!/usr/bin/env python3
"""Writes tests/fixtures/tables: one table in the forms of several programs, with rows.json as they must be read.

Needs: pip install pyarrow pandas polars datasets
"""

import decimal
import gzip
import json
import pathlib
import sys

import datasets
import pandas
import polars
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

FOLDER = pathlib.Path(__file__).parent.parent / "tests/fixtures/tables"
COUNT = 40


def row(i):
    """A row in verl's form, with columns of the kinds that such files have."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": f"What is {i} + {i}? ½ ∑ 字" + " long" * (i % 7)},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i, "split": "train", "parts": [[i], [], [i, i + 1]], "note": None if i % 3 else "n"},
        "large": 2**53 + 1 + i,
        "share": i / 7,
        "flag": i % 2 == 0,
        "empty": None,
        "tags": None if i % 5 == 0 else ["a", None, "b"][: i % 4],
        "kind": ["red", "green", "blue"][i % 3],
    }


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [row(i) for i in range(COUNT)]
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            (
                "extra_info",
                pa.struct(
                    [
                        ("index", pa.int64()),
                        ("split", pa.string()),
                        ("parts", pa.list_(pa.list_(pa.int64()))),
                        ("note", pa.string()),
                    ]
                ),
            ),
            ("large", pa.int64()),
            ("share", pa.float64()),
            ("flag", pa.bool_()),
            ("empty", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("kind", pa.string()),
        ]
    )
    table = pa.Table.from_pylist(rows, schema)
    texts = [json.dumps(row, ensure_ascii=False) for row in rows]
    (FOLDER / "rows.json").write_text("[\n" + ",\n".join(texts) + "\n]\n", encoding="utf-8")
    with gzip.GzipFile(FOLDER / "rows.jsonl.gz", "wb", mtime=0) as file:
        file.write("\n".join(texts).encode())
    for compression in ["none", "snappy", "zstd", "gzip"]:
        pq.write_table(table, FOLDER / f"pyarrow_{compression}.parquet", compression=compression, row_group_size=16)
    pq.write_table(table, FOLDER / "pyarrow_plain.parquet", use_dictionary=False, data_page_version="2.0")
    large = pa.schema([(f.name, pa.large_string() if f.type == pa.string() else f.type) for f in schema])
    pq.write_table(table.cast(large), FOLDER / "pyarrow_large_string.parquet")
    kind = table.set_column(9, "kind", table["kind"].dictionary_encode())
    pq.write_table(kind, FOLDER / "pyarrow_dictionary.parquet")
    table.to_pandas().to_parquet(FOLDER / "pandas.parquet")
    frame = polars.from_arrow(table)
    frame.write_parquet(FOLDER / "polars.parquet")
    frame.write_parquet(FOLDER / "polars_snappy.parquet", compression="snappy")
    datasets.Dataset(table).to_parquet(FOLDER / "datasets.parquet")
    with open(FOLDER / "pyarrow_zstd.parquet", "rb") as file, gzip.GzipFile(
        FOLDER / "gzipped.parquet.gz", "wb", mtime=0
    ) as packed:
        packed.write(file.read())
    # Numbers that JSON writers lose: decimals, and integers beyond a float.
    numbers = pa.table(
        {
            "d": pa.array([decimal.Decimal("1.20"), decimal.Decimal("-0.05"), None], pa.decimal128(38, 2)),
            "small": pa.array([decimal.Decimal("12.5"), decimal.Decimal("-3.0"), None], pa.decimal128(5, 1)),
            "u": pa.array([2**64 - 1, 0, None], pa.uint64()),
            "f": pa.array([0.1, float("nan"), None], pa.float32()),
            "b": pa.array([b"text", b"\xff\x00", None], pa.binary()),
            "i8": pa.array([-128, 127, None], pa.int8()),
        }
    )
    pq.write_table(numbers, FOLDER / "numbers.parquet")
    plain = table.select(["data_source", "kind"]).append_column("n", pa.array([str(i) for i in range(COUNT)]))
    pa.csv.write_csv(plain, FOLDER / "rows.csv")
    polars.from_arrow(plain).write_csv(FOLDER / "rows.tsv", separator="\t")
    print(f"wrote {FOLDER}", file=sys.stderr)


if __name__ == "__main__":
    main()
