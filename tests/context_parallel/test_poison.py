"""Megatron under poison: every algorithm trains the same, and a wait that one forgets is found."""

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.engine.planning.patch_checks import with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.patches import Wrap
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.harness import verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.conftest import Prove

LONG = pytest.mark.long
POISON: dict[str, dict[str, Any]] = {"context-parallel": {"size": 2}, "device-emulation": {"poison": True}}
WAIT = "mindspeed.ops.process_groups:PendingCollective.wait"
OTHERS = ("ulysses-attention", "kv-allgather-cp", "adaptive-cp")
FOUR = {"ring-attention": {"window": 2}, "hybrid-attention": {"ulysses_degree": 2}, "adaptive-cp": {"ulysses_degree": 2}}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ring-attention", *OTHERS])
def test_megatron_trains_the_same_when_early_uses_are_poison(prove: Prove, algorithm: str) -> None:
    assert prove(algorithm, settings=POISON).problems == []


@pytest.mark.long
@pytest.mark.parametrize("algorithm", FOUR)
def test_it_does_on_four_ranks_in_a_double_ring_and_where_neighbours_trade_heads(prove: Prove, algorithm: str) -> None:
    settings = {**POISON, "context-parallel": {"size": 4}, algorithm: FOUR[algorithm]}
    assert prove(algorithm, settings=settings).problems == []


@pytest.mark.long
@pytest.mark.budget(8)
@pytest.mark.parametrize("algorithm", ["ring-attention", pytest.param("ulysses-attention", marks=LONG)])
def test_a_forgotten_wait_in_megatron_is_found(pool: WorkerPool, algorithm: str) -> None:
    question = build_case([algorithm], [Layer("test", settings=POISON)])
    patch = Wrap(WAIT, "tests.context_parallel.watched:used_early", "a planted fault")
    forgetful = with_sites([PlannedPatch("fault", patch, WAIT)])
    verdict = verify(replace(question, plan=replace(question.plan, patches=(*question.plan.patches, *forgetful))), pool)
    assert "gradient of decoder.layers.0.self_attention.linear_qkv.weight is not finite" in [
        check.what for check in verdict.checks if not check.holds
    ]
