"""The framework beside that of another checkout: the same benchmarks in turns, CPU time, ratios.

``python -m benchmarks compare CHECKOUT`` runs this checkout's benchmarks with the other's ``mindspeed`` and with its own, and
fails where its own takes more than 1.25 of the other's. A ratio above 1.1 is measured again before it is believed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.table import read_rows

FRAMEWORK: Final = ("resolver", "patching", "apply", "discovery", "cli")
LIMIT: Final = 1.25
DOUBT: Final = 1.1
ROUNDS: Final = 4
"""Most turns of a benchmark."""
ROOT: Final = Path(__file__).resolve().parents[1]


def compare(other: Path, here: Path = ROOT, names: tuple[str, ...] = FRAMEWORK) -> int:
    """Print old, new and their ratio for each row; return 1 if one is beyond the limit, or no longer runs."""
    failed = False
    for name in names:
        old, new = dict[str, float](), dict[str, float]()
        for turn in range(ROUNDS):
            for found, checkout in ((old, other), (new, here))[:: 1 if turn % 2 else -1]:
                for what, spent in measure(name, checkout).items():
                    found[what] = min(spent, found.get(what, spent))
            if not new or all(new[what] <= DOUBT * old[what] for what in new.keys() & old.keys()):
                break
        if not new:
            print(f"FAILED benchmarks/{name}.py does not run with {here}")
        elif not old:
            print(f"not compared: benchmarks/{name}.py does not run with {other}")
        slow = [what for what in new if what in old and new[what] > LIMIT * old[what]]
        failed = failed or not new or bool(slow)
        for what in new.keys() & old.keys():
            verdict = "SLOWER" if what in slow else "ok    "
            print(f"{verdict} {what}: {old[what]:.3g} -> {new[what]:.3g}, ratio {new[what] / old[what]:.2f}")
    return int(failed)


def measure(name: str, checkout: Path) -> dict[str, float]:
    """CPU times of a benchmark of this checkout with the ``mindspeed`` of another one, by row; empty if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")
        output = Path(folder) / "rows.json"
        environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{checkout.resolve()}"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", str(output), "--brief"]
        subprocess.run(command, check=False, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
        return {row.what: row.measured for row in read_rows(output) if row.wall is not None} if output.exists() else {}
