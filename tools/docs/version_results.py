"""Results of `make test-versions` and `make test-hybrid` as a table: ``python -m tools.docs.version_results FOLDER`` fills it.

They are kept in mindspeed/workbench/diagnostics/version_results.json:
for each version its Python and torch, and for each feature
``passed`` or the reason why not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from mindspeed.workbench.diagnostics.support_matrix import engine_results
from tools.docs.markdown import table

FILE: Final = Path(__file__).parents[2] / "mindspeed" / "workbench" / "diagnostics" / "version_results.json"
PASSED: Final = "passed"
NOT_RUN: Final = "not run"

Results = dict[str, dict[str, Any]]


def kept_results() -> Results:
    """``{version: {"python", "torch", "features": {name: passed or why not}, "hybrid": the same on a HybridModel}}``."""
    results: Results = json.loads(FILE.read_text(encoding="utf-8"))
    return results


def taken_over(results: Results, answers: Mapping[str, Any]) -> Results:
    """The results with what one version has printed (`tests.megatron.versions.verify_cases`) in the place of what it had."""
    cases = {name: answer for name, answer in answers["cases"].items() if answer.get("alone")}
    rows = {name: result_of(name, answer) for name, answer in sorted(cases.items())}
    version = answers["megatron"]
    if answers.get("hybrid"):
        return {**results, version: {**results[version], "hybrid": rows}}
    row = {"python": answers["python"], "torch": answers["torch"], "features": rows}
    return {**results, version: {**results.get(version, {}), **row}}


def result_of(name: str, answer: Mapping[str, Any]) -> str:
    """Return ``passed``, or why a feature was not seen to hold."""
    return PASSED if answer["holds"] else reason(answer["problems"], name)


def reason(problems: Sequence[str], name: str = "") -> str:
    """The Megatron that a feature needs, else its own condition that refuses it, else the first problem, in few words."""
    lines = [problem.splitlines()[0] for problem in problems] or ["no verdict"]
    needed = [
        found[1]
        for line in lines
        if (found := re.fullmatch(r"MS208 \S+ (needs megatron-core \S+), but the version is \S+", line))
    ]
    refused = [line.removeprefix(f"MS304 {name}: ") for line in lines if line.startswith(f"MS304 {name}: ")]
    return needed[0] if needed else f"refused: {refused[0]}" if refused else f"fails: {lines[0]}"


def result_table(names: Sequence[str]) -> list[str]:
    """A row for each feature, a column for each version; a feature that a version was not tried with says so."""
    results = kept_results()
    versions = sorted(results, key=Version)
    engine = engine_results()
    columns = {f"{version}, Python {_short(results[version])}": results[version]["features"] for version in versions}
    columns |= {f"{version}, HybridModel": results[version]["hybrid"] for version in versions if "hybrid" in results[version]}
    rows = [[name, *(column.get(name, NOT_RUN) for column in columns.values()), engine.get(name, "-")] for name in names]
    return table(("feature", *columns, "0.16.1, on Transformer Engine's layers"), rows)


def _short(result: Mapping[str, Any]) -> str:
    """Return the Python of a version's results without its last number."""
    return str(result["python"]).rpartition(".")[0]


if __name__ == "__main__":
    found = kept_results()
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        found = taken_over(found, json.loads(file.read_text(encoding="utf-8")))
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
