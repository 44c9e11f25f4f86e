"""The calls of operators in a job reach the kernels of an NPU and of a GPU, or the plan says that they do not."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed.problems import ResolutionError
from mindspeed.registry import catalog
from mindspeed.workbench.verification.kernel_calls import judge
from mindspeed.workbench.verification.pool import WorkerPool

FEATURES = catalog(frozenset()).specs
SMALLEST: dict[str, tuple[Sequence[str], Mapping[str, Any]]] = {
    "rms-norm": (("rotary-embedding", "swiglu", "flash-attention"), {}),
    "moe-token-permute": (("moe-alltoall-dispatcher",), {"num_experts": 4}),
    "ring-attention-update": ((), {}),
}
"""Small jobs: a feature of level 1 with others, and the model. The first one is in the default run."""
RESULTS = Path("build/kernel_calls")
"""A file for each feature, which ``python -m tools.docs.results kernels build/kernel_calls`` puts into the support table."""


@pytest.mark.budget(8)
@pytest.mark.parametrize(
    "name", ["rms-norm", *(pytest.param(name, marks=pytest.mark.long) for name in SMALLEST if name != "rms-norm")]
)
def test_level_one_reaches_its_kernels(pool: WorkerPool, name: str) -> None:
    also, world = SMALLEST[name]
    judged = judge(name, pool, also, world)
    assert judged.unexplained == []
    assert all(counted.taken for counted in judged.calls.values())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_feature_reaches_its_kernels_or_its_plan_says_so(pool: WorkerPool, name: str) -> None:
    try:
        judged = judge(name, pool)
    except ResolutionError as error:
        pytest.skip(f"refused in this job: {error.problems[0].message}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(judged.to_json()) + os.linesep, encoding="utf-8")
    assert judged.unexplained == []
