"""Every pair of the features that move memory: refused with a reason, or equal to the bit."""

from contextlib import nullcontext
from itertools import combinations

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.workbench.verification.case import build_case
from tests.conftest import Prove, differences
from tests.memory.test_layer_parts import SIX

BUDGET = {"adaptive-recompute": {"budget_mb": 10.0, "profiling_steps": 2}}
REFUSED = {
    ("activation-recompute", "adaptive-recompute"),
    ("adaptive-recompute", "norm-recompute"),
    ("adaptive-recompute", "swap-attention"),
}
PAIRS = list(combinations(sorted(SIX), 2))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_is_refused_or_accepted(pair: tuple[str, str]) -> None:
    settings = {name: BUDGET[name] for name in pair if name in BUDGET}
    expected = pytest.raises(ResolutionError, match="conflicts with") if pair in REFUSED else nullcontext()
    with expected:
        build_case(pair, [Layer("test", settings=settings, world={"dtype": "bf16"})], (), 1)


@pytest.mark.long
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids="+".join)
def test_an_accepted_pair_is_equal_to_the_bit(prove: Prove, pair: tuple[str, str]) -> None:
    settings = {name: BUDGET[name] for name in pair if name in BUDGET}
    verdict = prove(*pair, settings=settings, world={"dtype": "bf16"}, nproc=1)
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
