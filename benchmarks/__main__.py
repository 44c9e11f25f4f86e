"""``python -m benchmarks``: every benchmark file in its own process, one table, ``runs/benchmarks.json``.

``--write`` also keeps the rows in ``benchmarks/results.json`` and makes the table of ``benchmarks/README.md`` from it, and
``python -m benchmarks NAME ... --write`` only those of some files. ``python -m benchmarks page`` makes the table again.
``python -m benchmarks compare CHECKOUT`` measures the framework beside that of another checkout (`benchmarks.compare`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.compare import compare
from benchmarks.table import Row, machine, read_rows, report

BEGIN, END = "<!-- table -->", "<!-- end -->"
HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
README: Final = HERE / "README.md"
NOT_BENCHMARKS: Final = {"__init__", "__main__", "compare", "gpu", "table"}
NAMES: Final = sorted(
    file.stem for file in HERE.glob("*.py") if file.stem not in NOT_BENCHMARKS and not file.stem.startswith("_")
)


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says, and return its exit status."""
    words = [word for word in arguments if not word.startswith("--")]
    if words[:1] == ["compare"]:
        return compare(Path(words[1]))
    if words != ["page"]:
        rows, failed = run(words or NAMES)
        missed = report(rows, HERE.parent / "runs" / "benchmarks.json") if rows else 0
        for name in failed:
            print(f"FAILED benchmarks/{name}.py gave no result")
        if "--write" not in arguments:
            return (missed + len(failed)) > 0
        keep(rows)
    README.write_text(page(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def run(names: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The rows of some benchmark files, and the names of those that gave none."""
    rows: list[Row] = []
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", str(output)]
            subprocess.run(command, check=False, cwd=HERE.parent, stdout=subprocess.DEVNULL)
            if output.exists():
                rows += read_rows(output)
            else:
                failed.append(name)
    return rows, failed


def keep(rows: Sequence[Row]) -> None:
    """Put rows into `RESULTS`, each in the place of the one of the same name."""
    kept = {row["what"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    for row in rows:
        kept[row.what] = {**vars(row), "machine": machine()}
    text = json.dumps({"rows": list(kept.values())}, indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")


def page(text: str) -> str:
    """A page with the table of what is kept between its marks."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    machines = dict.fromkeys(row.pop("machine") for row in data)
    rows = [Row(**row) for row in data]
    lines = [f"Measured on {'; '.join(machines)}.", "", "| what | target | measured | | command |", "|---|---|---|---|---|"]
    for row in rows:
        miss = "" if row.met else "missed"
        lines.append(f"| {row.what} | {row.bound} | {row.value} | {miss} | `{row.command}` |")
    remarks: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            remarks.setdefault(row.note, []).append(row.what)
    notes = [f"- {'; '.join(what)}: {note}." for note, what in remarks.items()]
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n" + "\n".join([*lines, "", *notes]) + f"\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
