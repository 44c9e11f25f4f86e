"""Exposed transfer time on the pages of features: a table and a picture of what ``python -m benchmarks.exposed`` has found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from benchmarks.exposed import CASES, COLUMNS, RESULTS
from mindspeed.workbench.exposure.machines import PUBLISHED
from mindspeed.workbench.pages.markdown import table
from mindspeed.workbench.pictures.drawing import Picture
from tools.docs.drawing import Lanes

_HEADERS = ("transfers", "exposed without overlap", "exposed", "step")


def cases_of(feature: str) -> list[str]:
    """Return the cases of a feature that were simulated."""
    return [name for name in CASES if name.partition(",")[0] == feature and name in _results()]


def picture_of(feature: str) -> list[Picture]:
    """Return the picture of a feature: what computes and what is transferred in its first case, on each machine."""
    cases = cases_of(feature)
    if not cases:
        return []
    found = _results()[cases[0]]
    text = "The rank that waits longest. Gaps in the row compute are exposed transfers."
    rows = [(Lanes(f"{machine}: {row['step']:,.1f} ms", _named(row["lanes"])),) for machine, row in found.items()]
    return [Picture(f"{feature}-exposed", "Compute and transfers of a step, simulated", text, rows)]


def lines_of(feature: str) -> list[str]:
    """Return the table of a feature as one block; none without results."""
    rows = [
        (name, machine, *(f"{row[column]:,.2f} ms" for column in (*COLUMNS, "step")))
        for name in cases_of(feature)
        for machine, row in _results()[name].items()
    ]
    if not rows:
        return []
    about = (
        "Transfer time that compute does not hide, on the rank that waits longest. It is simulated from the order of products, "
        f"posts and waits that a dry run records (`python -m benchmarks.exposed {feature}`; `benchmarks/exposed.py` has the "
        "job). Without overlap, each transfer is waited for where it is posted. Only products and attention take time."
    )
    machines = "".join(f"\n- *{machine.name}*: {machine.source}." for machine in PUBLISHED)
    return [about + "\n" + machines + "\n\n" + "\n".join(table(("case", "machine", *_HEADERS), rows))]


@cache
def _results() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return found


def _named(lanes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Number communicators, whose names are those of a process."""
    return {
        name if name == "compute" or name.startswith("host") else f"communicator {number}": intervals
        for number, (name, intervals) in enumerate(lanes.items())
    }
