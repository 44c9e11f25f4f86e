"""Take over what `make test-pythons` found: ``python -m tools.docs.python_results build/python-results``.

It is kept in mindspeed/workbench/diagnostics/python_results.json:
for each Python its exact version, its torch, the checks and, for
each Megatron, ``passed`` or the reason why the claims were not verified, and its row of the support matrix.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from mindspeed.workbench.diagnostics.support_matrix import PYTHON_RESULTS, python_results
from tools.docs.markdown import table

NOT_AT_HAND: Final = "not at hand when it was run"


def row_of(checks: Mapping[str, str], claims: Mapping[str, str]) -> dict[str, str]:
    """Return the state and the note of a Python in the support matrix."""
    every = {**checks, **{f"claims beside {version}": answer for version, answer in claims.items()}}
    if failed := [name for name, answer in every.items() if answer.startswith("fails")]:
        return {"state": "fails", "note": f"`make test-pythons`: {', '.join(failed)}"}
    note = ", ".join(name for name, answer in checks.items() if answer == "passed")
    if passed := [version for version, answer in claims.items() if answer == "passed"]:
        note += f"; claims beside megatron-core {', '.join(passed)}"
    if missing := [name for name, answer in every.items() if answer == "not run"]:
        note += f"; not run: {', '.join(missing)}"
    return {"state": "tested, long", "note": note}


def python_table(results: Collection[Mapping[str, Any]]) -> list[str]:
    """Return a row for each check and each Megatron, a column for each Python."""
    checks = sorted({name for result in results for name in result["checks"]})
    megatrons = sorted({version for result in results for version in result["claims"]}, key=Version)
    rows = [[name, *(result["checks"].get(name, NOT_AT_HAND) for result in results)] for name in checks]
    rows += [
        [f"claims beside megatron-core {version}", *(result["claims"].get(version, NOT_AT_HAND) for result in results)]
        for version in megatrons
    ]
    return table(("what", *(f"Python {result['python']}, torch {result['torch']}" for result in results)), rows)


if __name__ == "__main__":
    found = python_results()
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        answers = json.loads(file.read_text(encoding="utf-8"))
        claims = dict(sorted(answers["claims"].items(), key=lambda row: Version(row[0])))
        found[file.stem] = answers | {"claims": claims, **row_of(answers["checks"], claims)}
    PYTHON_RESULTS.write_text(json.dumps(dict(sorted(found.items(), key=lambda row: Version(row[0]))), indent=1) + "\n")
