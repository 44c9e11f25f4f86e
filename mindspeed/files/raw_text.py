"""Read the documents of raw training text: records of JSON, CSV, Parquet and Arrow files, and lines of text files. Light."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.problems import Fix, Fixes, Problem, RunError, advice, near_names

_KEY_OF_LINES: Final = "text"
"""The field under which a line of a text file stands."""
_COLUMNAR: Final = "pyarrow"
Record = tuple[int, Any]
"""A number, which begins at 1, and what stands there."""


def raw_files(path: Path) -> tuple[Path, ...]:
    """Return the files of raw text at a path: the file, or those of a folder."""
    if path.is_file():
        return (path,) if path.suffix in _READERS else ()
    if not path.is_dir():
        return ()
    return tuple(sorted(file for file in path.iterdir() if file.suffix in _READERS and file.is_file()))


def mixed_formats(folder: Path, files: Sequence[Path]) -> Problem | None:
    """Return MS601 for a folder with files of several formats, of which some are perhaps no training text."""
    counts = Counter(file.suffix for file in files)
    if len(counts) < 2:
        return None
    found = " and ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items()))
    fix = Fix.advise("give a file, or a folder with files of one format")
    return Problem("MS601", f"{folder} has {found} files, but training text of one format is read", where=str(folder), fix=fix)


def unreadable_start(files: Sequence[Path], key: str) -> Problem | None:
    """Return the problem of the first document, where finding it does not read a whole file."""
    if files[0].suffix == ".json":
        return None
    try:
        next(documents(files[:1], key), None)
    except RunError as error:
        return error.problems[0]
    return None


def is_raw(path: Path) -> bool:
    """Return whether the name of a file is that of raw text, whether it exists or not."""
    return path.suffix in _READERS


def missing_package(files: Sequence[Path]) -> Problem | None:
    """Return MS501 for files that only a package reads which is not installed."""
    columnar = [file for file in files if file.suffix in _BY_PACKAGE]
    if not columnar or find_spec(_COLUMNAR) is not None:
        return None
    text = f"{columnar[0]} needs the package {_COLUMNAR}, which is not installed"
    return Problem("MS501", text, where=str(columnar[0]), fix=Fix.advise(f"pip install {_COLUMNAR}"))


def documents(files: Sequence[Path], key: str) -> Iterator[str]:
    """Yield the texts under a field of the records of some files, without empty ones.

    Raises RunError with MS601 for a record without the field, or that cannot be read.
    """
    for file in files:
        try:
            for number, record in _READERS[file.suffix](file):
                if text := _text(record, key, f"{file}, record {number}"):
                    yield text
        except (OSError, ValueError, csv.Error) as error:
            fix = Fix.advise(f"correct {file}, or give another path")
            raise RunError([Problem("MS601", f"{file} cannot be read: {error}", where=str(file), fix=fix)]) from error


def _text(record: Any, key: str, place: str) -> str:
    text = record.get(key) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    fix: Fixes = (Fix.give_option("--json-keys", "FIELD"),)
    if not isinstance(record, dict):
        problem, fix = f"{place} is no record with fields", advice("give one JSON object for each document")
    elif key in record:
        problem = f"{place} has no text in the field {key!r}, but {type(text).__name__}"
    else:
        problem = f"{place} has no field {key!r}, only {', '.join(map(repr, record)) or 'none'}"
        if near := near_names(key, record, cutoff=0.6):
            fix = (Fix.give_option("--json-keys", near[0]),)
    raise RunError([Problem("MS601", problem, where=place, fix=fix)])


def _json_records(file: Path) -> Iterator[Record]:
    """Yield the objects of a file: one on each line, or the members of one array."""
    with file.open(encoding="utf-8-sig") as lines:
        first = next((line.lstrip() for line in lines if line.strip()), "")
        lines.seek(0)
        if first.startswith("["):
            yield from enumerate(json.load(lines), 1)
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from error


def _csv_records(file: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as rows:
        yield from enumerate(csv.DictReader(rows, restkey="", strict=True), 1)


def _lines(file: Path) -> Iterator[Record]:
    with file.open(encoding="utf-8-sig") as lines:
        yield from ((number, {_KEY_OF_LINES: line.rstrip("\n")}) for number, line in enumerate(lines, 1))


def _parquet_records(file: Path) -> Iterator[Record]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        yield from _rows(table.iter_batches())


def _arrow_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file in Arrow's format of files or of streams, which Hugging Face's datasets write."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            table = pyarrow.ipc.open_file(source)
            batches: Iterator[Any] = map(table.get_batch, range(table.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
        yield from _rows(batches)


def _rows(batches: Iterator[Any]) -> Iterator[Record]:
    yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)


_BY_PACKAGE: Final[dict[str, Callable[[Path], Iterator[Record]]]] = {".parquet": _parquet_records, ".arrow": _arrow_records}
_READERS: Final[dict[str, Callable[[Path], Iterator[Record]]]] = {
    ".jsonl": _json_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".txt": _lines,
    **_BY_PACKAGE,
}
"""Formats by the suffix of their files."""
