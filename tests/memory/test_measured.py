"""The planner's peak beside the peak of a training step, for jobs of several features, layouts and types."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed.diagnostics.job_memory import options_of, stages_of
from mindspeed.resolution.request import Layer
from mindspeed.verification.case import build_case
from mindspeed.verification.pool import WorkerPool

pytestmark = pytest.mark.long

LARGER: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 176, "seq_length": 64, "vocab_size": 128}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "num_query_groups": 2,
    "rotary": True,
    "tied_embeddings": False,
}
BF16: dict[str, Any] = {"dtype": "bf16"}


def full(method: str, layers: int) -> dict[str, dict[str, Any]]:
    return {"recompute": {"granularity": "full", "method": method, "num_layers": layers}}


JOBS: list[tuple[tuple[str, ...], int, dict[str, Any], dict[str, dict[str, Any]]]] = [
    (("norm-recompute",), 1, {}, {}),
    (("activation-recompute", "norm-recompute"), 1, LARGER | LLAMA | BF16, {}),
    (("swap-attention",), 1, LARGER, {}),
    (("recompute",), 1, LARGER, full("uniform", 1)),
    (("recompute",), 1, LARGER | LLAMA, full("block", 2)),
    (("rms-norm", "swiglu", "flash-attention"), 1, LARGER | LLAMA | BF16, {}),
    (("reuse-fp32-param", "swap-optimizer"), 1, LARGER | BF16, {}),
    (("norm-recompute",), 1, LARGER | {"multi_latent_attention": True}, {}),
    (("tensor-parallel",), 2, LARGER, {}),
    (("sequence-parallel", "norm-recompute"), 2, LARGER, {}),
    (("pipeline-parallel",), 2, LARGER, {}),
    (("virtual-pipeline",), 2, LARGER, {}),
    (("nano-pipe",), 2, LARGER, {}),
    (("recompute-in-advance",), 2, LARGER, {}),
    (("expert-parallel",), 2, {}, {}),
    (("distributed-optimizer",), 2, LARGER | BF16, {}),
    (("distributed-optimizer",), 2, LARGER | LLAMA | BF16 | {"seq_length": 16}, {}),  # its gradients outweigh its activations
]


@pytest.mark.parametrize(
    ("names", "nproc", "world", "settings"), JOBS, ids=lambda value: "+".join(value) if isinstance(value, tuple) else ""
)
def test_the_foretold_peak_is_within_five_percent(
    pool: WorkerPool, names: tuple[str, ...], nproc: int, world: dict[str, Any], settings: dict[str, dict[str, Any]]
) -> None:
    case = build_case(names, [Layer("test", world=world, settings=settings)], (), nproc)
    foretold = max(stage.peak for stage in stages_of(case.plan, options_of(case.plan, case.recipe.shape.dropout > 0)))
    measured = max(peak for _, peak in pool.measure(case.plan, case.recipe, nproc))
    assert foretold == pytest.approx(measured, rel=0.05)
