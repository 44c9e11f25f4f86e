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
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.compare import compare
from benchmarks.table import Row, machine, read_rows, report

BEGIN, END = "<!-- table -->", "<!-- end -->"
HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
README: Final = HERE / "README.md"
NOT_BENCHMARKS: Final = {"__init__", "__main__", "compare", "exposed", "gpu", "schedules", "sparse_attention", "table"}
NAMES: Final = sorted(
    file.stem for file in HERE.glob("*.py") if file.stem not in NOT_BENCHMARKS and not file.stem.startswith("_")
)


@click.command()
@click.argument("words", metavar="[NAME...] | compare CHECKOUT | page", nargs=-1)
@click.option("--write", is_flag=True, help="Keep the rows in results.json, and make the table of README.md from it.")
def main(words: tuple[str, ...], write: bool) -> None:
    """Run all benchmark files, or those of some names; or compare with a checkout; or make the table of the page."""
    if len(words) == 2 and words[0] == "compare":
        sys.exit(compare(Path(words[1])))
    if words == ("page",):
        rewrite_page()
        return
    if unknown := [word for word in words if word not in NAMES]:
        raise click.UsageError(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    rows, failed = run(words or NAMES)
    missed = report(rows, HERE.parent / "runs" / "benchmarks.json") if rows else 0
    for name in failed:
        print(f"FAILED benchmarks/{name}.py gave no result")
    if write:
        keep(rows)
        rewrite_page()
    elif missed or failed:
        sys.exit(1)


def rewrite_page() -> None:
    """Make the table of the page from what is kept."""
    README.write_text(page(README.read_text(encoding="utf-8")), encoding="utf-8")


def run(names: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The rows of some benchmark files, and the names of those that gave none."""
    rows: list[Row] = []
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", str(output)]
            start = time.perf_counter()
            subprocess.run(command, check=False, cwd=HERE.parent, stdout=subprocess.DEVNULL)
            found = read_rows(output) if output.exists() else []
            print(f"benchmarks/{name}.py: {len(found)} rows in {time.perf_counter() - start:,.0f} s", file=sys.stderr)
            rows += found
            if not found:
                failed.append(name)
    return rows, failed


def keep(rows: Sequence[Row]) -> None:
    """Put rows into `RESULTS`, each in the place of that of its name and processor: a row has a result for each processor.

    What the same commands measured on this processor under other names before is dropped.
    """
    made = [{**vars(row), "machine": machine()} for row in rows]
    again = {(row["command"], _processor(row)) for row in made}
    names = {row["what"] for row in made}
    kept = {
        (row["what"], _processor(row)): row
        for row in _kept()
        if row["what"] in names or (row["command"], _processor(row)) not in again
    }
    kept |= {(row["what"], _processor(row)): row for row in made}
    text = json.dumps({"rows": list(kept.values())}, indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")


def _kept() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return rows


def _processor(row: Mapping[str, Any]) -> str:
    """Return the cores that a row was measured on, without the version of Python."""
    return str(row["machine"]).partition(",")[0]


def page(text: str) -> str:
    """A page with the table of what is kept between its marks: a column for each processor, in the order of `RESULTS`."""
    results: dict[str, dict[str, Row]] = {}
    remarks: dict[str, list[str]] = {}
    processors: dict[str, str] = {}
    for kept in _kept():
        processor = _processor(kept)
        processors[processor] = kept.pop("machine")
        row = Row(**kept)
        results.setdefault(row.what, {})[processor] = row
        if row.note:
            remarks.setdefault(row.note, []).append(row.what)
    heads = ["what", "target", *processors, "command"]
    lines = [f"Measured on {'; '.join(processors.values())}.", "", _line(heads), _line(["---"] * len(heads))]
    for what, measured in results.items():
        row = next(reversed(measured.values()))
        values = (_value(measured.get(processor)) for processor in processors)
        lines.append(_line([what, row.bound, *values, f"`{row.command}`"]))
    notes = [f"- {'; '.join(dict.fromkeys(what))}: {note}." for note, what in remarks.items()]
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n" + "\n".join([*lines, "", *notes]) + f"\n{END}{after}"


def _value(row: Row | None) -> str:
    """The cell of a result."""
    if row is None:
        return "not measured"
    return row.value if row.met else f"{row.value}, missed"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
