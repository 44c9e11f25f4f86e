"""Add the steps of a run to the measurements from which ``mindspeed tune`` predicts."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path


def add_to_store(prediction: Path, seconds: Sequence[float]) -> bool:
    """Write the median of ``seconds`` where the search that made ``prediction`` looks for it; return whether it was written.

    Rank 0 alone writes, and only with the number of processor cores and the torch that the search had. A file that cannot be
    read or written costs the measurement, not the run.
    """
    if os.environ.get("RANK", "0") != "0":
        return False
    with suppress(OSError, ValueError, KeyError):
        known = json.loads(prediction.read_text(encoding="utf-8"))
        machine = known["machine"]
        if (machine["cores"], machine["torch"]) != (str(os.cpu_count()), version("torch").partition("+")[0]):
            return False
        file = Path(known["file"])
        found = {"key": known["key"], "seconds": statistics.median(seconds), "work": known["work"], "steps": len(seconds)}
        file.parent.mkdir(parents=True, exist_ok=True)
        machine_file = file.parents[1] / "machine"
        if not machine_file.exists():
            machine_file.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(file)
        return True
    return False
