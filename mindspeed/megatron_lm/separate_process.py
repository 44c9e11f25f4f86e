"""Work before a job in a separate process, in which Megatron is imported with the parts that its platform needs.

The process of the job imports nothing for it, and what fails there leaves nothing behind here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from mindspeed import registry
from mindspeed.problems import MindSpeedError, Problem, RunError, advice

_LAUNCHED: Final = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "TORCHRUN_",
    "SLURM_",
    "MINDSPEED_PLAN",
)
"""Beginnings of the variables by which a launcher makes a process one of its ranks."""


def call_separately(function: str, given: Mapping[str, Any], doing: str, log: Path, code: str) -> None:
    """Call ``module:function`` with keyword arguments that JSON can hold, its output in a log file.

    Raises RunError with the problems of the function, or with this code and the last line of the log where it fails otherwise.
    """
    print(f"mindspeed: {doing}; progress is in {log}", file=sys.stderr, flush=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHED)}
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [sys.executable, "-m", __name__, function, str(_report(log))],
            input=json.dumps(given),
            text=True,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        if problems := _reported(log):
            raise RunError(replace(problem, chain=(*problem.chain, f"{doing}, see {log}")) for problem in problems)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with status {done.returncode}"
        fix = f"correct what {log} shows, and start the job again"
        raise RunError([Problem(code, f"{doing} failed: {reason}", where=str(log), fix=advice(fix))])


def _report(log: Path) -> Path:
    """Return the file of the problems with which a process ended."""
    return log.with_name(f"{log.name}.problems")


def _reported(log: Path) -> list[Problem]:
    """Return the problems with which a process ended, and delete their file."""
    report = _report(log)
    if not report.is_file():
        return []
    problems = json.loads(report.read_text(encoding="utf-8"))
    report.unlink()
    return [Problem.from_json(problem) for problem in problems]


def main(function: str, report: str) -> None:
    """Call a function with the keyword arguments on the standard input, under the plan without features."""
    try:
        registry.activate(registry.resolve((), replace(registry.probe(), world_size=1)))
        resolve_name(function)(**json.load(sys.stdin))
    except MindSpeedError as error:
        Path(report).write_text(json.dumps([problem.to_json() for problem in error.problems]), encoding="utf-8")
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
