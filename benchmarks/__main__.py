"""``python -m benchmarks``: every benchmark file in its own process, one table, ``runs/benchmarks.json``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Row, report

NOT_BENCHMARKS = {"__init__", "__main__", "table"}


def run() -> int:
    here = Path(__file__).parent
    rows: list[Row] = []
    failed = []
    for file in sorted(here.glob("*.py")):
        if file.stem in NOT_BENCHMARKS or file.stem.startswith("_"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            command = [sys.executable, "-m", f"benchmarks.{file.stem}", str(output)]
            subprocess.run(command, check=False, cwd=here.parent, stdout=subprocess.DEVNULL)
            if not output.exists():
                failed.append(file.stem)
                continue
            data = json.loads(output.read_text())
        rows += [Row(**{key: value for key, value in row.items() if key != "met"}) for row in data["rows"]]
    missed = report(rows, here.parent / "runs" / "benchmarks.json")
    for name in failed:
        print(f"FAILED benchmarks/{name}.py gave no result")
    return missed + len(failed)


if __name__ == "__main__":
    sys.exit(run() > 0)
