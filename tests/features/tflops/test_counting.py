"""Operations of a step: of the model by its shape, of the hardware as they ran, on every layout."""

from dataclasses import replace
from typing import Any

import pytest

from mindspeed import registry
from mindspeed.job.arithmetic import attention_forward, mlp_forward, score_forward, shape_of_world
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, LLAMA, MOE, GptShape, Recipe
from tests.features.tflops.counting_job import counted

FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
SAMPLES = 8


def count(
    pool: WorkerPool,
    shape: GptShape,
    *features: str,
    settings: dict[str, dict[str, Any]] | None = None,
    ranks: int = 1,
    level: int = 2,
    **world: Any,
) -> dict[str, float]:
    recipe = Recipe(shape, steps=1, global_batch_size=SAMPLES)
    known = {**recipe.world(), "world_size": ranks, **world}
    plan = registry.plan(["tflops", *features], settings, world=known, platform="cpu", level=level)
    results = pool.call(counted, ranks, recipe, plan=plan)
    assert all(result["flops.hardware"] == results[0]["flops.hardware"] for result in results)
    return dict(results[0])


def shape_of(shape: GptShape) -> Any:
    plan = registry.plan(world={**Recipe(shape).world(), "world_size": 1}, platform="cpu", level=0)
    return shape_of_world(plan.world)


def squares(shape: GptShape) -> int:
    """Operations of a step that the causal mask hides and Megatron's own attention runs."""
    model = shape_of(shape)
    whole = replace(model, causal=False)
    return 3 * SAMPLES * model.num_layers * (score_forward(whole) - score_forward(model))


def test_megatrons_attention_runs_whole_squares_and_nothing_twice(pool: WorkerPool) -> None:
    found = count(pool, LLAMA, level=0)
    assert found["flops.hardware"] == found["flops.model"] + squares(LLAMA)
    assert found["flops.recomputed"] == 0
    assert found["tflops.hardware"] > found["tflops.model"] > 0


@pytest.mark.long
@pytest.mark.parametrize("shape", [GPT, LLAMA, MOE], ids=lambda shape: shape.name)
def test_with_attention_of_visible_pairs_the_hardware_runs_the_model(pool: WorkerPool, shape: GptShape) -> None:
    also = ["grouped-matmul-add"] if shape.num_experts else []
    found = count(pool, shape, "flash-attention", "matmul-add", *also)
    assert found["flops.hardware"] == found["flops.model"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mla", "mtp"])
def test_latent_attention_and_predicted_tokens_are_counted(pool: WorkerPool, kind: str) -> None:
    """Level 0 runs squares of scores in each attention layer, and everything else once."""
    latent = kind == "mla"
    shape = replace(LLAMA, name=kind, multi_latent_attention=latent, mtp_num_layers=0 if latent else 1)
    if latent:
        shape = replace(shape, num_query_groups=shape.num_attention_heads)
    found = count(pool, shape, level=0)
    widths = 8 + 4 + 10 if latent else 2 * 8  # of query and value of a head
    hidden_pairs = shape.seq_length * (shape.seq_length - 1) // 2
    layers = shape.num_layers + shape.mtp_num_layers
    assert found["flops.hardware"] - found["flops.model"] == 3 * SAMPLES * layers * 2 * 4 * widths * hidden_pairs


@pytest.mark.long
def test_full_recompute_adds_the_forward_pass_of_the_layers(pool: WorkerPool) -> None:
    found = count(pool, LLAMA, "recompute", "flash-attention", settings=FULL)
    shape = shape_of(LLAMA)
    layers = SAMPLES * LLAMA.num_layers * (attention_forward(shape) + mlp_forward(shape))
    assert found["flops.recomputed"] == layers
    assert found["flops.hardware"] == found["flops.model"] + layers


AHEAD: dict[str, tuple[GptShape, tuple[str, ...], dict[str, dict[str, Any]], dict[str, int]]] = {
    "a stage ahead": (LLAMA, ("recompute-in-advance",), {}, {"pp": 2}),
    "in the bubble": (LLAMA, ("recompute-in-bubble",), {}, {"pp": 2, "vpp": 2}),
    "experts, a stage ahead": (MOE, ("recompute-in-advance",), {}, {"pp": 2}),
    "experts, weight gradients later": (MOE, ("nano-pipe", "recompute-in-advance"), {}, {"pp": 2, "vpp": 2}),
    "experts, whole layers": (MOE, ("zero-bubble", "recompute"), FULL, {"pp": 2}),
    "experts without a first product": (MOE, ("moe-zero-memory",), {"moe-zero-memory": {"level": "level1"}}, {"ep": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", AHEAD)
def test_what_runs_beyond_the_model_is_recomputed_wherever_it_runs(pool: WorkerPool, case: str) -> None:
    shape, features, settings, sizes = AHEAD[case]
    found = count(pool, shape, "flash-attention", *features, settings=settings, ranks=2, **sizes)
    assert found["flops.recomputed"] == found["flops.hardware"] - found["flops.model"] > 0


@pytest.mark.long
@pytest.mark.parametrize("size", ["tp", "pp", "cp", "ep"])
def test_a_layout_runs_what_one_process_runs(pool: WorkerPool, size: str) -> None:
    shape = MOE if size == "ep" else LLAMA
    also = {"cp": ["ring-attention"]}.get(size, ["flash-attention"])
    found = count(pool, shape, *also, ranks=2, **{size: 2})
    assert found["flops.hardware"] == found["flops.model"]


@pytest.mark.long
def test_a_peak_gives_shares_of_it(pool: WorkerPool) -> None:
    found = count(pool, LLAMA, settings={"tflops": {"peak": 2.0}})
    assert found["tflops.mfu"] == found["tflops.model"] / 2
    assert found["tflops.hfu"] == found["tflops.hardware"] / 2
