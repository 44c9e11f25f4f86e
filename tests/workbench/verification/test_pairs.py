"""Sets of features in the surroundings that they declare: what one does for another is no lost effect, and all hold."""

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.comparison import ComparisonResult
from mindspeed.workbench.verification.harness import Verdict, verify
from mindspeed.workbench.verification.pool import WorkerPool
from tests.workbench.verification.test_verification import each_long_but

PAIRS = [
    ("dynamic-shapes nano-pipe",),
    ("alibi moe-alltoall-overlap",),
    ("alibi ring-attention-update",),
    ("ampipe moe-alltoall-dispatcher",),
    ("activation-recompute moe-shared-experts",),
    ("adaptive-recompute moe-grouped-gemm",),
    ("adaptive-recompute shared-attention-mask",),
    ("eod-reset ring-attention-update",),
    ("moe-alltoall-overlap transformer-engine-layers",),
    ("rms-norm transformer-engine-layers",),
    ("shared-attention-mask swap-attention",),
    ("swap-optimizer transformer-engine-layers",),
    ("tflops moe-token-permute",),
    ("coc deepspeed-moe",),
    ("coc dynamic-shapes",),
    ("coc noop-layers",),
    ("coc tensor-parallel",),
    ("dynamic-shapes recompute-in-advance",),
    ("dynamic-shapes recompute-in-bubble",),
    ("hybrid-attention tensor-parallel",),
    ("kv-allgather-cp pipe-experts",),
    ("moe-grouped-gemm tensor-parallel",),
    ("reuse-fp32-param tensor-parallel",),
    ("deepspeed-moe-dropless tensor-parallel",),
    ("reuse-fp32-param rotary-embedding",),
    ("swap-optimizer moe-grouped-gemm coc",),
    ("swap-optimizer distributed-optimizer",),
    ("swap-optimizer tensor-parallel",),
    ("swap-optimizer tensor-parallel-2d",),
    ("tensor-parallel-2d noop-layers",),
]


def verdict_of(names: str, pool: WorkerPool) -> Verdict:
    return verify(build_case(names.split(), [Layer("test", platform="cpu")]), pool)


@pytest.mark.parametrize("names", [PAIRS[0][0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS[1:])])
def test_features_hold_together_without_any_option(pool: WorkerPool, names: str) -> None:
    assert [str(problem) for problem in verdict_of(names, pool).problems] == []


@pytest.mark.parametrize(
    ("names", "idle"),
    each_long_but(
        0,
        [
            (
                "flash-attention ring-attention",
                "flash-attention: cp is 2, and the context-parallel algorithm already calls the same attention operator",
            ),
            (
                "ring-attention shared-attention-mask",
                (
                    "shared-attention-mask: context parallelism (cp=2) computes the causal mask itself, so layers have no "
                    "mask to share"
                ),
            ),
        ],
    ),
)
def test_an_effect_that_another_feature_takes_over_is_a_row(pool: WorkerPool, names: str, idle: str) -> None:
    verdict = verdict_of(names, pool)
    assert verdict.holds
    assert ComparisonResult(f"idle of {idle}", 0.0, 0.0, idle=True) in verdict.checks
