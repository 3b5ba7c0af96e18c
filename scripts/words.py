#!/usr/bin/env python3
"""Counts words and long sentences of the README and the pages in docs/, or lines of code.

    scripts/words.py [PAGE...]    without PAGE: README.md and docs/*.md
    scripts/words.py --code       lines of code of each folder in src/; of benches, kernels, scripts and tests beside them

Prints, for each page, its words as `wc -w` counts them, the number of its sentences, and the share of sentences over 25
words. docs/recipes.md is generated and is left out unless it is named. Sentences are those of prose: headings, tables, code
blocks and images do not count. A link counts as its text, and code within a line as its words.

Lines of code are those with more than white space and a comment. In src/, tests do not count: modules and files of tests, and
on_device, the tests that need a GPU.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ["recipes.md"]
SENTENCE_WORDS_MAX = 25

# A full stop after these does not end a sentence.
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|no)\.$", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?=[)\"'*`]*\s+[\"'*`(\[]*[A-Z0-9`\u0394-\u03c9])")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


def paragraphs(text):
    """Yields the paragraphs and list items of a Markdown page, without tables, headings and code blocks."""
    lines, in_code = [], False
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        fence = stripped.startswith("```")
        in_code ^= fence
        is_prose = not fence and not in_code and stripped and stripped[0] not in "#|" and not stripped.startswith("![")
        if (not is_prose or ITEM.match(line)) and lines:
            yield " ".join(lines)
            lines = []
        if is_prose:
            lines.append(ITEM.sub("", line, count=1).strip())


def sentences(text):
    """Returns the sentences of a Markdown page."""
    found = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        start = 0
        for end in SENTENCE_END.finditer(plain):
            if ABBREVIATION.search(plain[start : end.end()]):
                continue
            found.append(plain[start : end.end()].strip())
            start = end.end()
        found.append(plain[start:].strip())
    return [sentence for sentence in found if re.search(r"\w", sentence)]


TEST_MODULE = re.compile(
    r"^( *)#\[cfg\((?:all\()?test\b.*\n(?:\1#.*\n)*\1(?:pub(?:\(.*\))? )?mod \w+ \{\n(?:.*\n)*?\1\}\n", re.MULTILINE
)


def code_lines(file):
    """Returns the number of lines of code of a Rust, C++, CUDA, Python or shell file; of Rust's without modules of tests."""
    text, comment = file.read_text(encoding="utf-8"), "#"
    if file.suffix != ".py" and file.suffix != ".sh":
        text, comment = TEST_MODULE.sub("", text), "//"
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith(comment))


def print_code():
    counts = Counter()
    for folder in ("src", "benches", "kernels", "scripts", "tests"):
        suffixes = {".rs"} if folder == "src" else {".rs", ".cu", ".cuh", ".cpp", ".h", ".py", ".sh"}
        for file in sorted((ROOT / folder).rglob("*")):
            inside = file.relative_to(ROOT / folder)
            is_test = folder == "src" and ("on_device" in str(inside) or file.name == "tests.rs")
            if file.suffix in suffixes and not is_test:
                name = f"src/{inside.parts[0].removesuffix('.rs')}" if folder == "src" else folder
                counts[name] += code_lines(file)
    counts["src"] = sum(count for name, count in counts.items() if name.startswith("src/"))
    for name, count in sorted(counts.items(), key=lambda entry: (entry[0].startswith("src/"), -entry[1])):
        print(f"{name:<18}  {count:>6}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--long", action="store_true", help="print the long sentences too")
    parser.add_argument("--code", action="store_true", help="lines of code instead")
    arguments = parser.parse_args()
    if arguments.code:
        print_code()
        return
    pages = arguments.pages
    if not pages:
        docs = (page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)
        pages = [ROOT / "README.md", *docs]

    rows = []
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"words.py: {page}: {error}")
        found = sentences(text)
        long = [sentence for sentence in found if len(sentence.split()) > SENTENCE_WORDS_MAX]
        rows.append((page.name, len(text.split()), len(found), len(long)))
        if arguments.long:
            for sentence in long:
                print(f"{page.name}: {len(sentence.split())} words: {sentence}")

    total = ("total", *(sum(row[column] for row in rows) for column in (1, 2, 3)))
    width = max(len(row[0]) for row in [*rows, total, ("page",)])
    print(f"{'page':<{width}}  words  sentences  over {SENTENCE_WORDS_MAX} words")
    for name, words, count, long in [*rows, total]:
        print(f"{name:<{width}}  {words:>5}  {count:>9}  {long / max(count, 1):>13.1%}")


if __name__ == "__main__":
    main()
