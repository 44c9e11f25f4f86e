"""Random numbers of a step under context parallelism: what is dropped where, and what comes after."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mindspeed import plan
from mindspeed.plugins import Numerics
from mindspeed.registry import catalog
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, Recipe
from tests.features.parity import FULL, RINGS, cp, given, trains

STEPS, BATCH = 2, 2


def masks_and_states(recipe: Recipe) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What the embedding's dropout keeps, call by call, while this rank trains, and every random state at the end by name."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from torch.nn.modules.module import register_module_forward_hook

    from mindspeed.workbench.verification.training import train

    masks: list[torch.Tensor] = []

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Dropout):
            masks.append(output.detach() != 0)

    handle = register_module_forward_hook(record)
    try:
        train(recipe)
    finally:
        handle.remove()
    return masks, {"default": torch.cuda.get_rng_state(), **get_cuda_rng_tracker().get_states()}


def trained(pool: WorkerPool, cp: int, tp: int = 1, *features: str) -> list[Any]:
    """Of every rank. Without attention dropout of Megatron's own, the embedding's is the only module that drops."""
    shape = replace(GPT, num_layers=1, seq_length=16, dropout=0.5)
    recipe = Recipe(shape, steps=STEPS, global_batch_size=BATCH)
    world = {**recipe.world(), "cp": cp, "tp": tp, "world_size": cp * tp}
    names = ["ring-attention"] if cp > 1 else []
    chosen = plan(
        [*names, *features], settings={"tensor-parallel": {"size": tp}} if tp > 1 else {}, platform="cpu", world=world
    )
    return pool.call(masks_and_states, cp * tp, recipe, plan=chosen)


def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    """About a half for independent masks of this size."""
    return float((one == other).double().mean())


@pytest.mark.long
def test_ranks_drop_other_elements_in_a_step_and_have_one_state_after_it(pool: WorkerPool) -> None:
    ranks = trained(pool, 2)
    masks = [mask for masks, _ in ranks for mask in masks]
    assert len(masks) == 2 * STEPS * BATCH
    for number, one in enumerate(masks):
        for other in masks[:number]:
            assert 0.35 < agreement(one, other) < 0.65
    states, others = (states for _, states in ranks)
    assert len(states) > 1
    assert states.keys() == others.keys()
    assert [name for name, state in states.items() if not torch.equal(state, others[name])] == []


@pytest.mark.long
def test_tensor_parallel_ranks_share_what_they_share_in_megatron(pool: WorkerPool) -> None:
    ranks = [masks for masks, _ in trained(pool, 2, 2)]
    for first, second in zip(ranks[0::2], ranks[1::2], strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    assert all(0.35 < agreement(mine, theirs) < 0.65 for mine, theirs in zip(ranks[0], ranks[2], strict=True))


@pytest.mark.long
def test_sequence_parallel_ranks_have_other_tokens_as_well(pool: WorkerPool) -> None:
    ranks = [masks for masks, _ in trained(pool, 2, 2, "sequence-parallel")]
    for number, one in enumerate(ranks):
        for other in ranks[:number]:
            assert all(0.3 < agreement(mine, theirs) < 0.7 for mine, theirs in zip(one, other, strict=True))


HYBRID = {"hybrid-attention": {"ulysses_degree": 2}}
BESIDE = {"tensor ranks": ("tensor-parallel", "sequence-parallel"), "stages": ("pipeline-parallel",)}
WAYS = {"whole layers": FULL, "core attention": {}}
# recompute claims equal bits, so that both runs have dropout; and both have this algorithm
test_recomputation_drops_the_same_elements_again = trains(
    "recompute",
    {f"{name}, {way}": given(also=[name], settings=cp(2, **WAYS[way])) for name in RINGS for way in WAYS}
    | {f"hybrid, {way}": given(also=["hybrid-attention"], settings=cp(4, **HYBRID, **WAYS[way])) for way in WAYS}
    | {beside: given(also=["ring-attention", *BESIDE[beside]], settings=cp(2, **FULL)) for beside in BESIDE},
)


def test_recomputation_claims_equal_bits() -> None:
    assert catalog(frozenset()).specs["recompute"].numerics == Numerics.exact()
