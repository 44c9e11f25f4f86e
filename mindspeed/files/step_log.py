"""The log of a run: one JSON object per line in ``log.jsonl``, with the numbers of a step. Light."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

LOG: Final = "log.jsonl"
FORMER_LOG: Final = "log-before.jsonl"
"""The log of a run in the same folder that ended before its first checkpoint."""


def open_log(run: Path, first: int) -> TextIO:
    """Open the log of a run that continues from step ``first``; what an earlier run from step 0 logged is moved aside.

    A last row that a process did not finish is removed.
    """
    path = run / LOG
    if first == 0 and path.exists():
        path.replace(path.with_name(FORMER_LOG))
    if path.exists() and (rest := len(path.read_bytes().rpartition(b"\n")[2])):
        os.truncate(path, path.stat().st_size - rest)
    return path.open("a", encoding="utf-8")


def row(step: int, numbers: Mapping[str, float | None]) -> str:
    """Return the line of a step; dots in the names of numbers nest them, as in `nested`."""
    return json.dumps({"step": step, **nested(numbers)}) + "\n"


def nested(numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """Nest numbers by the dots of their names: ``{"a.b": 1}`` is ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in numbers.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log; a last row that a process did not finish is none. Raises OSError."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
