"""Counts the phrases of phrases.txt in docs, strings and comments; the count of a file may only fall.

    python tests/style/phrases.py            # what make check runs: fails if a count has risen
    python tests/style/phrases.py --list     # every place, with what to write instead; more arguments: only these files
    python tests/style/phrases.py --update   # write the counts as they are now; after a merge with conflicts too

counts.txt has one line for each file, so that changes to different files merge.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COUNTS = HERE / "counts.txt"
FOLDERS = ["runtime", "monarch_kernel", "notebooks", "benchmarks", "docs"]
SUFFIXES = {".py", ".md", ".ipynb"}
START = r"(?:(?<=^)|(?<=[.!?:] )|(?<=\"\"\")|(?<=- )|(?<=# ))"
"""The start of a sentence: of a text, a docstring, an item of a list or a comment."""
TEXT = {"STRING", "COMMENT", "FSTRING_MIDDLE"}


class Phrase(NamedTuple):
    pattern: re.Pattern[str]
    instead: str


class Place(NamedTuple):
    file: str
    line: int
    text: str
    instead: str


def phrases() -> list[Phrase]:
    lines = [line for line in (HERE / "phrases.txt").read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("\t") for line in lines]
    return [Phrase(re.compile(pattern.replace(r"\bSTART", START)), instead) for pattern, instead in pairs]


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """The strings and comments of a program, with their lines; comments on lines of their own are one text."""
    comment, start, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" and comment and token.start[0] == last + 1:
            comment, last = f"{comment} {token.string.lstrip('# ')}", token.start[0]
        elif kind == "COMMENT":
            if comment:
                yield start, comment
            comment, start, last = token.string, token.start[0], token.start[0]
        elif kind in TEXT:
            yield token.start[0], token.string
    if comment:
        yield start, comment


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of a page, without code."""
    code, paragraph, start = False, "", 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if paragraph and (not line.strip() or fence or line.lstrip().startswith(("- ", "|", "#"))):
            yield start, paragraph
            paragraph = ""
        if code or fence or not line.strip() or (line.startswith("    ") and not paragraph):
            continue
        start = start if paragraph else number
        paragraph = f"{paragraph} {line.strip()}".strip()


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from texts_of_markdown(source)
    elif path.suffix == ".py":
        yield from texts_of_python(source)
    else:
        for cell in json.loads(source)["cells"]:
            if cell["cell_type"] == "markdown":
                yield from texts_of_markdown("".join(cell["source"]))


def places(path: Path, known: list[Phrase]) -> Iterator[Place]:
    """Where a file has one of the phrases; a question may start with any word."""
    for line, text in texts_of(path):
        text = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`code`", text))
        for phrase in known:
            for found in phrase.pattern.finditer(text):
                if re.match(r"[^.!:]*\?", text[found.start() :]):
                    continue
                yield Place(str(path.relative_to(ROOT)), line, text[found.start() :][:60], phrase.instead)


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    kept = [path for path in found if not {"executed", "results", "node_modules", ".ipynb_checkpoints"} & {*path.parts}]
    return sorted([*kept, *ROOT.glob("*.md")])


def counts(known: list[Phrase]) -> dict[str, int]:
    found = {str(path.relative_to(ROOT)): sum(1 for _ in places(path, known)) for path in files()}
    return {file: count for file, count in found.items() if count}


def allowed() -> dict[str, int]:
    """The counts that are written down; where a merge has left a file twice, the smaller one."""
    found: dict[str, int] = {}
    for line in COUNTS.read_text().splitlines():
        file, _, count = line.rpartition(" ")
        if count.isdigit():
            found[file] = min(int(count), found.get(file, int(count)))
    return found


def update(now: dict[str, int]) -> None:
    COUNTS.write_text("".join(f"{file} {count}\n" for file, count in sorted(now.items())))
    print(f"{sum(now.values())} places in {len(now)} files")


def check(known: list[Phrase]) -> int:
    limit, risen = allowed(), 0
    for file, count in counts(known).items():
        if count > limit.get(file, 0):
            risen += 1
            print(f"{file}: {count} phrases to avoid, {limit.get(file, 0)} allowed:")
            for place in places(ROOT / file, known):
                print(f"  {file}:{place.line}: {place.text!r}: write {place.instead}")
    return 1 if risen else 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Count phrases to avoid.")
    parser.add_argument("--list", nargs="*", metavar="FILE", help="print every place, or those of some files")
    parser.add_argument("--update", action="store_true", help="write the counts as they are now")
    given = parser.parse_args(arguments)
    known = phrases()
    if given.update:
        update(counts(known))
    elif given.list is not None:
        for path in [Path(each).resolve() for each in given.list] or files():
            for place in places(path, known):
                print(f"{place.file}:{place.line}: {place.text!r}: write {place.instead}")
    else:
        return check(known)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
