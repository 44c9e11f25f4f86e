"""Jobs of several features, layouts and types, whose peak the planner foretells."""

from __future__ import annotations

from typing import Any

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.memory_planner.plans import stages_of
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool

Settings = dict[str, dict[str, Any]]
Job = tuple[tuple[str, ...], int, dict[str, Any], Settings]
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


def full(method: str, layers: int) -> Settings:
    """Return the settings of full recomputation."""
    return {"recompute": {"granularity": "full", "method": method, "num_layers": layers}}


JOBS: list[Job] = [
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


def foretold_and_measured(pool: WorkerPool, job: Job) -> tuple[int, int]:
    """Return the planner's peak of a job, and that of a training step."""
    names, nproc, world, settings = job
    case = build_case(names, [Layer("job", world=world, settings=settings)], (), nproc)
    foretold = max(stage.peak for stage in stages_of(case.plan, registry.catalog(), case.recipe.shape.dropout > 0))
    return foretold, max(peak for _, peak in pool.measure(case.plan, case.recipe, nproc))
