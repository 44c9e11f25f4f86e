"""The log of a run: one JSON object per line in ``log.jsonl``, with the numbers of a step. Light."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LOG: Final = "log.jsonl"


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
