"""``python -m benchmarks``: every benchmark file in its own process, one table, ``runs/benchmarks.json``.

``--write`` also puts the table into ``benchmarks/README.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Row, machine, report

BEGIN, END = "<!-- table -->", "<!-- end -->"
NOT_BENCHMARKS = {"__init__", "__main__", "gpu", "table"}


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
    if "--write" in sys.argv:
        write_readme(here / "README.md", rows)
    for name in failed:
        print(f"FAILED benchmarks/{name}.py gave no result")
    return missed + len(failed)


def write_readme(path: Path, rows: list[Row]) -> None:
    """Exchange the table between the marks of a page."""
    lines = [f"Measured on {machine()}.", "", "| what | target | measured | | command |", "|---|---|---|---|---|"]
    for row in rows:
        miss = "" if row.met else "missed"
        lines.append(f"| {row.what} | {row.bound} | {row.measured:.3g} {row.unit} | {miss} | `{row.command}` |")
    remarks: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            remarks.setdefault(row.note, []).append(row.what)
    notes = [f"- {'; '.join(what)}: {note}." for note, what in remarks.items()]
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n" + "\n".join([*lines, "", *notes]) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run() > 0)
