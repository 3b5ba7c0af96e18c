#!/usr/bin/env bash
# Fetches data sets and small models from their official places into data/ and models/, where recipes look.
#
#   rloss fetch NAME...                   below the working directory
#   scripts/fetch_data.sh                 GSM8K, below the source tree
#   scripts/fetch_data.sh all             all data sets
#   scripts/fetch_data.sh NAME...         some of the names at the end of this file
#
# DATA and MODELS name other folders. A file that is already there is left alone; delete it to fetch it again.
# Every file is checked against its SHA-256 where one is known, and is only then moved into place.
# Problem texts belong to their owners; each kind's licence is printed as it is fetched.
set -euo pipefail
case $0 in *fetch_data.sh) cd "$(dirname "$0")/.." ;; esac
data=${DATA:-data} models=${MODELS:-models}
command -v curl >/dev/null || {
    echo "error: fetching needs curl; install it" >&2
    exit 1
}

sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1
}

# get PATH URL [SHA256]: PATH is below $data.
get() { get_file "$data/$1" "${@:2}"; }

get_file() {
    local path=$1 url=$2 expected=${3:-} actual code=0
    if [ -s "$path" ]; then
        echo "there already: $path"
        return
    fi
    mkdir -p "$(dirname "$path")"
    echo "fetching: $path"
    curl --fail --location --silent --retry 3 --output "$path.part" "$url" || code=$?
    if [ $code -ne 0 ]; then
        rm -f "$path.part"
        case $code in
            5 | 6 | 7 | 28 | 35) echo "error: no network reaches $url; try again with one" >&2 ;;
            *) echo "error: could not fetch $url: curl ends with code $code" >&2 ;;
        esac
        exit 1
    fi
    if [ -n "$expected" ]; then
        actual=$(sha256 "$path.part")
        if [ "$actual" != "$expected" ]; then
            rm -f "$path.part"
            echo "error: $url: SHA-256 is $actual, not $expected" >&2
            exit 1
        fi
    fi
    mv "$path.part" "$path"
    echo "fetched: $path"
}

fetch_gsm8k() {
    echo "GSM8K, MIT licence, openai/grade-school-math"
    local base=https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data
    get gsm8k/train.jsonl $base/train.jsonl 17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465
    get gsm8k/test.jsonl $base/test.jsonl 3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14
}

fetch_aime() {
    echo "AIME 2024 and 2025: the problems are the MAA's; for evaluation"
    local base=https://raw.githubusercontent.com/zhshgmail/AReaL/04ab6018c4ef43919348efdc52ba6b679a14ce88/evaluation/data
    get aime/aime-2024.jsonl $base/aime24/test.jsonl
    get aime/aime-2025.jsonl $base/aime25/test.jsonl
}

fetch_math() {
    echo "MATH-500, MIT licence, openai/prm800k; the problems' owners keep their rights"
    get math/math-500.jsonl \
        https://media.githubusercontent.com/media/openai/prm800k/7ecc794703b2877f63226f2477a49b34f9b25163/prm800k/math_splits/test.jsonl \
        35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132
}

# The published file repeats each problem many times and holds it inside a prompt: each is kept once, bare.
fetch_dapo_math() {
    echo "DAPO-Math-17k, Apache-2.0, BytedTsinghua-SIA/DAPO-Math-17k"
    local rows=$data/dapo-math/integer-answer-prompts.jsonl.gz parquet=$data/dapo-math/dapo-math-17k.parquet
    if [ -s "$rows" ]; then
        echo "there already: $rows"
        return
    fi
    if ! python3 -c 'import pyarrow' 2>/dev/null; then
        echo "the set is a Parquet file: reading it needs python3 with pyarrow (pip install pyarrow)" >&2
        exit 1
    fi
    local keep=
    if [ -s "$parquet" ]; then keep=1; fi
    get dapo-math/dapo-math-17k.parquet \
        https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k/resolve/main/data/dapo-math-17k.parquet
    python3 - "$parquet" "$rows.part" <<'PYTHON'
import gzip, json, sys
import pyarrow.parquet as parquet

BEFORE = "where $Answer is the answer to the problem.\n\n"
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
seen = set()
with gzip.open(sys.argv[2], "wt", encoding="utf-8") as out:
    for batch in parquet.ParquetFile(sys.argv[1]).iter_batches(columns=["prompt", "reward_model"]):
        for row in batch.to_pylist():
            problem = row["prompt"][-1]["content"]
            if BEFORE in problem:
                problem = problem.split(BEFORE, 1)[1]
            problem = problem.removesuffix(AFTER).strip()
            if problem in seen:
                continue
            seen.add(problem)
            row = {"index": len(seen) - 1, "problem": problem, "answer": row["reward_model"]["ground_truth"]}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
print(len(seen), "problems")
PYTHON
    mv "$rows.part" "$rows"
    if [ -z "$keep" ]; then rm -f "$parquet"; fi
    echo "fetched: $rows"
}

fetch_ifeval() {
    echo "IFEval prompts, CC BY 4.0, Google; for evaluation only"
    get ifeval/input_data.jsonl \
        https://raw.githubusercontent.com/josejg/instruction_following_eval/0c495b2f95155e8b10acb919ae283bfb4d5be6e2/instruction_following_eval/data/input_data.jsonl \
        67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49
}

fetch_o200k() {
    echo "o200k vocabulary, MIT licence, and GPT-OSS's tokenizer, Apache-2.0"
    local plain=$data/o200k/o200k_base.tiktoken
    if [ ! -s "$plain.gz" ]; then
        get o200k/o200k_base.tiktoken https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken \
            446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d
        gzip -9 "$plain"
    fi
    plain=$data/o200k/tokenizer.json
    if [ ! -s "$plain.gz" ]; then
        get o200k/tokenizer.json https://huggingface.co/openai/gpt-oss-20b/resolve/main/tokenizer.json
        gzip -9 "$plain"
    fi
}

# fetch_qwen NAME: an Instruct model whose weights are one file.
fetch_qwen() {
    echo "$1, Apache-2.0, huggingface.co/Qwen/$1"
    local file
    # config.json comes last: a folder with it, but without weights, would be a model of random weights.
    for file in generation_config.json tokenizer_config.json tokenizer.json model.safetensors config.json; do
        get_file "$models/$1/$file" "https://huggingface.co/Qwen/$1/resolve/main/$file"
    done
}

if [ $# -eq 0 ]; then set -- gsm8k; fi
kinds=()
for kind in "$@"; do
    if [ "$kind" = all ]; then kinds+=(gsm8k aime math ifeval o200k dapo-math); else kinds+=("$kind"); fi
done
for kind in "${kinds[@]}"; do
    case $kind in
    gsm8k) fetch_gsm8k ;;
    aime) fetch_aime ;;
    math) fetch_math ;;
    ifeval) fetch_ifeval ;;
    o200k) fetch_o200k ;;
    dapo-math) fetch_dapo_math ;;
    qwen2.5-0.5b-instruct) fetch_qwen Qwen2.5-0.5B-Instruct ;;
    qwen2.5-1.5b-instruct) fetch_qwen Qwen2.5-1.5B-Instruct ;;
    qwen2.5-coder-0.5b-instruct) fetch_qwen Qwen2.5-Coder-0.5B-Instruct ;;
    *)
        echo "error: unknown name '$kind': this script lists the names" >&2
        exit 2
        ;;
    esac
done
