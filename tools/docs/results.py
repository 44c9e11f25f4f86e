"""Take over what long tests found for the support tables: ``python -m tools.docs.results KIND FOLDER``, see `KINDS`.

The tests leave a JSON file for each version, feature or Python in a folder. Results of before that are not in it are kept.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from mindspeed.workbench.diagnostics.support_matrix import (
    BACKEND_RESULTS,
    ENGINE_RESULTS,
    KERNEL_RESULTS,
    PYTHON_RESULTS,
    VERSION_RESULTS,
)

BUG_RESULTS: Final = Path(__file__).with_name("bug_results.json")
PASSED: Final = "passed"
Results = dict[str, Any]


def with_versions(results: Results, found: Mapping[str, Any]) -> Results:
    """Return results with what `tests.megatron.versions.verify_cases` printed for a version in the place of what it had."""
    for answers in found.values():
        cases = {name: answer for name, answer in answers["cases"].items() if answer.get("alone")}
        rows = {name: result_of(name, answer) for name, answer in sorted(cases.items())}
        made = {"hybrid": rows} if answers.get("hybrid") else {**_python(answers), "features": rows}
        results = {**results, answers["megatron"]: {**results.get(answers["megatron"], {}), **made}}
    return dict(sorted(results.items()))


def _python(answers: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": answers["python"], "torch": answers["torch"]}


def result_of(name: str, answer: Mapping[str, Any]) -> str:
    """Return ``passed``, or why a feature was not seen to hold."""
    return PASSED if answer["holds"] else reason(answer["problems"], name)


def reason(problems: Sequence[str], name: str = "") -> str:
    """Return the Megatron that a feature needs, else its own condition that refuses it, else the first problem."""
    lines = [problem.splitlines()[0] for problem in problems] or ["no verdict"]
    needed = [
        found[1]
        for line in lines
        if (found := re.fullmatch(r"MS208 \S+ (needs megatron-core \S+), but the version is \S+", line))
    ]
    refused = [line.removeprefix(f"MS304 {name}: ") for line in lines if line.startswith(f"MS304 {name}: ")]
    return needed[0] if needed else f"refused: {refused[0]}" if refused else f"fails: {lines[0]}"


def with_features(results: Results, found: Mapping[str, Any]) -> Results:
    """Return results of features with those that were found in the place of what they had."""
    return dict(sorted({**results, **found}.items()))


def with_backends(results: Results, found: Mapping[str, Any]) -> Results:
    """Return results by the rules of backends with those that were found, files named FEATURE.RULES, in their places."""
    for place, result in found.items():
        name, _, rules = place.partition(".")
        results = {**results, name: {**results.get(name, {}), rules: result}}
    return dict(sorted(results.items()))


def with_bugs(results: Results, found: Mapping[str, Any]) -> Results:
    """Return results with what `tests.megatron.bug_proofs` printed for a version in the place of what it had.

    A version has the bugs by what was seen of them without the patches that mend them, and why.
    """
    made: Results = {answers["megatron"]: {} for answers in found.values()}
    for answers in found.values():
        for name, seen in sorted(answers["bugs"].items()):
            made[answers["megatron"]].setdefault(seen["without"]["state"], {})[name] = seen["without"]["text"]
    return dict(sorted({**results, **made}.items(), key=lambda row: Version(row[0])))


def with_pythons(results: Results, found: Mapping[str, Any]) -> Results:
    """Return results under each Python, with its row of the support matrix."""
    for python, answers in found.items():
        claims = dict(sorted(answers["claims"].items(), key=lambda row: Version(row[0])))
        results = {**results, python: {**answers, "claims": claims, **_row(answers["checks"], claims)}}
    return dict(sorted(results.items(), key=lambda row: Version(row[0])))


def _row(checks: Mapping[str, str], claims: Mapping[str, str]) -> dict[str, str]:
    """Return the state and the note of a Python in the support matrix."""
    every = {**checks, **{f"claims beside {version}": answer for version, answer in claims.items()}}
    if failed := [name for name, answer in every.items() if answer.startswith("fails")]:
        return {"state": "fails", "note": f"`make test-pythons`: {', '.join(failed)}"}
    note = ", ".join(name for name, answer in checks.items() if answer == PASSED)
    if passed := [version for version, answer in claims.items() if answer == PASSED]:
        note += f"; claims beside megatron-core {', '.join(passed)}"
    if missing := [name for name, answer in every.items() if answer == "not run"]:
        note += f"; not run: {', '.join(missing)}"
    return {"state": "tested, long", "note": note}


KINDS: Final[Mapping[str, tuple[Path, Callable[[Results, Mapping[str, Any]], Results]]]] = {
    "versions": (VERSION_RESULTS, with_versions),
    "bugs": (BUG_RESULTS, with_bugs),
    "backends": (BACKEND_RESULTS, with_backends),
    "engine": (ENGINE_RESULTS, with_features),
    "kernels": (KERNEL_RESULTS, with_features),
    "pythons": (PYTHON_RESULTS, with_pythons),
}


if __name__ == "__main__":
    _, kind, folder = sys.argv
    file, taken_over = KINDS[kind]
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))}
    kept = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(taken_over(kept, found), indent=1) + "\n", encoding="utf-8")
