"""Packed sequences (Megatron's thd format) under every algorithm, against stock Megatron with a dense block-diagonal mask."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed import plan
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, LLAMA, GptShape, Recipe

pytestmark = pytest.mark.long

TOKENS = 24
ENDS = [1, 2, 9, 16, 24]
"""Two documents of one token, and borders of ranks inside of others."""


Result = tuple[float, list[int], Tensor, dict[str, Tensor]]
"""Loss, the places in the row of this rank's tokens, their gradients behind the embedding, gradients of parameters."""


def recipe(shape: GptShape) -> Recipe:
    return Recipe(replace(shape, num_layers=2, seq_length=TOKENS))


def trained(recipe: Recipe, ends: list[int], packed: bool, padded: list[int] | None = None) -> Result:
    """Loss, and the gradients of embedded tokens and of every parameter, of one row; sums over this rank's tokens.

    With ``padded`` documents take up that much room; tokens behind their ends count for nothing.
    """
    from megatron.core import parallel_state, tensor_parallel, utils
    from megatron.core.utils import unwrap_model

    from mindspeed.workbench.verification.model import build_chunks

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    (chunk,) = build_chunks(recipe)
    tokens, labels = torch.randint(recipe.shape.vocab_size, (2, 1, TOKENS), generator=torch.Generator().manual_seed(3))
    room = padded or ends
    behind = [TOKENS] if room[-1] < TOKENS else []
    places = torch.arange(TOKENS)
    number = torch.bucketize(places, torch.tensor([*room, *behind]), right=True)
    positions = (places - torch.tensor([0, *room])[number])[None]
    length = torch.tensor([0, *ends, *behind]).diff()
    counts = (positions < length[number]).float()
    batch: dict[str, Any] = {"tokens": tokens, "labels": labels, "position_ids": positions, "places": places[None]}
    batch["loss_mask"] = counts
    seen = {}
    if packed:
        cu = [torch.tensor([0, *x], dtype=torch.int32) for x in (ends, room)]
        longest = torch.tensor([max(torch.tensor([0, *room]).diff())])
        batch, seen["packed_seq_params"] = utils.get_thd_batch_on_this_cp_rank(batch, cu[0], cu[1], longest)
        mask = None
    else:
        mask = ((number[:, None] != number) | (places[:, None] < places))[None, None]
    inputs: list[Tensor] = []
    unwrap_model(chunk).embedding.register_forward_hook(lambda module, given, out: (out.retain_grad(), inputs.append(out))[0])
    losses = chunk(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], **seen)
    loss = (losses.float() * batch["loss_mask"]).sum()
    loss.backward()
    group = parallel_state.get_context_parallel_group()
    gradients = {}
    for name, parameter in unwrap_model(chunk).named_parameters():
        gradients[name] = parameter.main_grad.clone()
        dist.all_reduce(gradients[name], group=group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    assert inputs[0].grad is not None
    return float(total), batch["places"][0].tolist(), inputs[0].grad[:, 0], gradients


def assert_equal(ours: list[Result], stock: Result) -> None:
    loss, _, inputs, gradients = stock
    whole = torch.empty_like(inputs)
    for _, places, share, _ in ours:
        whole[places] = share
    assert ours[0][0] == pytest.approx(loss, rel=1e-6)
    assert float((whole - inputs).norm()) <= 1e-5 * float(inputs.norm())
    found = ours[0][3]
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def on(pool: WorkerPool, features: list[str], ranks: int, shape: GptShape, packed: bool, *documents: Any) -> list[Result]:
    chosen = recipe(shape)
    settings = {"hybrid-attention": {"ulysses_degree": 2}} if "hybrid-attention" in features else None
    world = {**chosen.world(), "world_size": ranks, "cp": ranks, "rotary": shape.rotary}
    made = plan(features, settings=settings, platform="cpu", world=world)
    return pool.call(trained, ranks, chosen, *documents[:1], packed, *documents[1:], plan=made)


ALGORITHMS = [
    ("flash-attention", 1),
    ("ring-attention", 2),
    ("ulysses-attention", 2),
    *(
        (name, ranks)
        for name, ranks in [
            ("kv-allgather-cp", 2),
            ("ring-attention", 3),
            ("ring-attention", 4),
            ("ulysses-attention", 4),
            ("hybrid-attention", 4),
            ("kv-allgather-cp", 4),
        ]
    ),
]


@pytest.mark.cover
@pytest.mark.guards(46, processes=True)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=lambda shape: shape.name)
@pytest.mark.parametrize(("algorithm", "ranks"), ALGORITHMS)
def test_packed_sequences_train_as_under_a_dense_mask(pool: WorkerPool, algorithm: str, ranks: int, shape: GptShape) -> None:
    (stock,) = on(pool, [], 1, shape, False, ENDS)
    assert_equal(on(pool, [algorithm], ranks, shape, True, ENDS), stock)


@pytest.mark.parametrize("ends", [[TOKENS], [0, 5, 5, TOKENS], [3, 7, 20]], ids=str)
def test_one_sequence_empty_ones_and_a_row_that_goes_on_behind_the_last(pool: WorkerPool, ends: list[int]) -> None:
    (stock,) = on(pool, [], 1, LLAMA, False, [*ends, TOKENS] if ends[-1] < TOKENS else ends)
    assert_equal(on(pool, ["ring-attention"], 2, LLAMA, True, ends), stock)


@pytest.mark.parametrize(("algorithm", "ranks"), [("flash-attention", 1), ("ring-attention", 2)])
def test_padding_behind_each_sequence_changes_nothing(pool: WorkerPool, algorithm: str, ranks: int) -> None:
    ends, padded = [3, 8, 15, 18], [4, 12, 20, 24]
    (stock,) = on(pool, [], 1, LLAMA, False, ends, padded)
    assert_equal(on(pool, [algorithm], ranks, LLAMA, True, ends, padded), stock)
