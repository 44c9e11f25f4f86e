"""Find which known bugs a Megatron checkout has, by the tests that show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.resolution.environment import version_in
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.lint.traps import known_traps

SOURCE: Final = Path(__file__).resolve().parents[3]
"""The folder of mindspeed's source, with its tests; of an installed mindspeed it has none."""
_PROOFS: Final = ("tests", "megatron", "bug_proofs")

AS_LISTED: Final = "as listed"
FIXED: Final = "this release has no such bug, but is in its range"
PRESENT: Final = "this release has the bug, but is not in its range"
UNMENDED: Final = "the patch does not mend it"
NOT_RUN: Final = "not run"


def bugs_on(checkout: Path, version: str, limit: float) -> list[dict[str, Any]]:
    """Run the tests of known bugs on a checkout, and return ``{"bug", "verdict", "seen"}`` for each.

    Raises RunError where mindspeed is installed without its tests, and where they do not end in ``limit`` seconds.
    """
    if not SOURCE.joinpath(*_PROOFS).with_suffix(".py").is_file():
        raise RunError([_unrun("the tests that show bugs of Megatron are not installed", "run it in a clone of mindspeed")])
    path = os.pathsep.join([str(SOURCE), str(checkout.resolve()), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-W", "ignore", "-m", ".".join(_PROOFS)]
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # the tests fork ranks, which threads do not survive
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=SOURCE, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise RunError([_unrun(f"the tests of known bugs did not end in {limit:.0f} s", "give more --minutes")]) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise RunError([_unrun(f"the tests of known bugs ended with {done.returncode}: {last}", "mend what they import")])
    return rows_of(json.loads(done.stdout.splitlines()[-1])["bugs"], version)


def rows_of(found: Mapping[str, Mapping[str, Mapping[str, str]]], version: str) -> list[dict[str, Any]]:
    """Compare what the tests have shown, without a bug's patches and with them, with the releases that its row names."""
    ranges = {trap.name: trap.megatron for trap in known_traps()}
    rows = []
    for name, seen in found.items():
        without, listed = seen["without"], version_in(version, ranges[name])
        if without["state"] == "not run":
            verdict = NOT_RUN
        elif "with" in seen and seen["with"]["state"] == "shown":
            verdict = UNMENDED
        elif without["state"] == "shown":
            verdict = AS_LISTED if listed else PRESENT
        else:
            verdict = FIXED if listed else AS_LISTED
        rows.append({"bug": name, "verdict": verdict, "seen": without["text"] or without["state"]})
    return rows


def wrong(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the bugs whose rows or patches do not fit the checkout."""
    return [row["bug"] for row in rows if row["verdict"] not in (AS_LISTED, NOT_RUN)]


def _unrun(text: str, advice: str) -> Problem:
    return Problem("MS607", text, fix=Fix.advise(advice))
