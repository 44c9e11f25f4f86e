"""Proves cases in one pool with the Megatron that this process would import; prints a JSON object on the last line.

Arguments: the names of cases, all when there are none; with --hybrid first the models are Megatron's HybridModel, and all are
the features alone. Printed: ``{"megatron": version, "root": the megatron folder that
plans are made for, "imported": file of the megatron.core that is imported here, "cases": {case: {"holds", "problems",
"features", "largest": {what: difference}}}}``.
"""

import json
import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mindspeed.engine.inspection.megatron_copies import megatron_version, package_root
from mindspeed.engine.resolution.environment import installed_version
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.megatron.versions.cases import CASES, SPECS, Case


def answer(case: Case, pool: WorkerPool, hybrid: bool) -> Mapping[str, Any]:
    layer = Layer("test", settings=case.settings, world=case.world, platform="cpu")
    try:
        question = build_case(case.features, [layer], case.also, case.nproc, hybrid=hybrid)
        verdict = verify(question, pool)
    except MindSpeedError as error:
        return {"holds": False, "problems": [str(problem) for problem in error.problems], "features": [], "largest": {}}
    largest: dict[str, float] = {}
    for check in verdict.checks:
        kind = check.what.partition(" of ")[0]
        largest[kind] = max(largest.get(kind, 0.0), check.largest_difference or 0.0)
    return {
        "holds": verdict.holds,
        "problems": [str(problem) for problem in verdict.problems],
        "features": [planned.name for planned in question.plan.features],
        "largest": largest,
    }


def main() -> None:
    hybrid = sys.argv[1:2] == ["--hybrid"]
    names = sys.argv[1 + hybrid :] or list(SPECS if hybrid else CASES)
    with WorkerPool() as pool:
        answers = {}
        for name in names:
            answers[name] = {**answer(CASES[name], pool, hybrid), "alone": name in SPECS}
            print(name, "holds" if answers[name]["holds"] else answers[name]["problems"], file=sys.stderr, flush=True)
    imported = find_spec("megatron.core")  # not imported: 0.19 asks for triton at its import, which the platform stands for
    file = imported.origin if imported is not None else None
    found = {"megatron": megatron_version(), "root": str(package_root("core")), "imported": file}
    versions = {"python": platform.python_version(), "torch": installed_version("torch")}
    print(json.dumps({**found, **versions, "hybrid": hybrid, "cases": answers}))


if __name__ == "__main__":
    main()
