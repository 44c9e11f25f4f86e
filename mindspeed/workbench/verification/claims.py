"""Verify the claims of features in one pool: ``python -m mindspeed.workbench.verification.claims`` reads names, a line each.

Every feature is verified in its smallest surroundings, with the Megatron that this process would import. Prints one JSON
object a line: first ``{"megatron", "root", "python", "torch"}``, then ``{"feature", "holds", "problems", "seconds"}`` for
each name as it is read, ``holds`` being null where the feature is refused.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from mindspeed.engine.inspection.megatron_copies import megatron_version, package_root
from mindspeed.engine.resolution.environment import installed_version
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import MindSpeedError, Problem
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.pool import WorkerPool


def verify_claim(name: str, pool: WorkerPool) -> dict[str, Any]:
    """Verify one feature and return its row."""
    start = time.monotonic()
    holds: bool | None = None
    problems: Sequence[Problem] = ()
    try:
        case = build_case([name], [Layer("claims", platform="cpu")])
        holds = False
        verdict = verify(case, pool)
        holds, problems = verdict.holds, verdict.problems
    except MindSpeedError as error:
        problems = error.problems
    seconds = 0.0 if holds is None else round(time.monotonic() - start, 1)
    return {"feature": name, "holds": holds, "problems": [str(problem) for problem in problems], "seconds": seconds}


def main() -> None:
    surroundings = {"megatron": megatron_version(), "root": str(package_root("core")), "python": platform.python_version()}
    print(json.dumps({**surroundings, "torch": installed_version("torch")}), flush=True)
    with WorkerPool() as pool:
        for line in sys.stdin:
            print(json.dumps(verify_claim(line.strip(), pool)), flush=True)


if __name__ == "__main__":
    main()
