"""Modules of `mindspeed.nn` that communicate: all ranks together compute what one process computes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindspeed import nn as own
from mindspeed.workbench.verification.pool import WorkerPool
from tests.nn import ranks

LONG = pytest.mark.long
WORLDS = [2, pytest.param(1, marks=LONG), pytest.param(4, marks=LONG)]
ALGORITHMS = [
    {"algorithm": "ring"},
    {"algorithm": "ring", "keep": "half"},
    {"algorithm": "ring", "causal": False},
    {"algorithm": "ulysses", "keep": "full"},
    {"algorithm": "kv-allgather"},
    {"algorithm": "adaptive"},
    {"algorithm": "hybrid", "inner": 2},
]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def gradients(result: Tensor, tensors: list[Tensor], towards: Tensor | None = None) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad(result, tensors, towards)]


@pytest.mark.parametrize("keywords", ALGORITHMS, ids=lambda keywords: "-".join(map(str, keywords.values())))
@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_is_attention_of_one_process(pool: WorkerPool, world: int, keywords: dict[str, Any]) -> None:
    if world % keywords.get("inner", 1):
        pytest.skip("the neighbours do not divide one rank")
    torch.manual_seed(1)
    shapes = [(2, 16, 4, 8), (2, 16, 4, 8), (2, 16, 4, 6), (2, 16, 4, 6)]
    tensors = [torch.randn(shape) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    call: dict[str, Any] = (
        {} if keywords["algorithm"] == "adaptive" else {"slopes": own.alibi_slopes(4), "ends": [[5, 16], [16]]}
    )
    expected = gradients(own.attention(*leaves, causal=keywords.get("causal", True), **call), leaves, tensors[3])
    shares = pool.call(ranks.attend, world, tensors, keywords, call, world == 2)
    for found in shares:
        close(found, expected)


@LONG
def test_hybrid_attention_on_a_mesh_of_two_dimensions(pool: WorkerPool) -> None:
    tensors = [torch.randn(2, 16, 4, 8) for _ in range(3)]
    for found in pool.call(ranks.hybrid_on_a_mesh_of_two_dimensions, 4, tensors):
        torch.testing.assert_close(found, own.attention(*tensors))


@pytest.mark.parametrize(("sequence_parallel", "chunks"), [(False, 1), (False, 2), (True, 1), (True, 2)])
@pytest.mark.parametrize("world", WORLDS)
def test_linear_layers_are_those_of_one_process(pool: WorkerPool, world: int, sequence_parallel: bool, chunks: int) -> None:
    x, towards = torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    torch.manual_seed(3)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16)
    given = x.clone().requires_grad_()
    expected = gradients(
        second(torch.relu(first(given))), [given, first.weight, first.bias, second.weight, second.bias], towards
    )
    for found in pool.call(ranks.feed_forward, world, x, towards, sequence_parallel, chunks):
        close(found, expected)


@pytest.mark.parametrize("chunks", [1, 2])
def test_linear_layers_on_a_mesh_of_two_dimensions(pool: WorkerPool, chunks: int) -> None:
    x, towards = torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    torch.manual_seed(3)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16)
    given = x.clone().requires_grad_()
    leaves = [given, first.weight, second.weight, first.bias, second.bias]
    out, dx, dfirst, dsecond, dbias, last = gradients(second(torch.relu(first(given))), leaves, towards)
    expected = [out, dx, last, dfirst.square().sum(), dsecond.square().sum(), dbias.sum()]
    for found in pool.call(ranks.feed_forward_on_a_grid, 4, x, towards, chunks):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


MIXTURES: list[dict[str, Any]] = [
    {},
    {"chunks": 2},
    {"dispatcher": "allgather"},
    {"zero_memory": "level0"},
    {"zero_memory": "level1", "chunks": 2},
]


@pytest.mark.parametrize("keywords", MIXTURES, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_experts_of_all_ranks_are_one_mixture(pool: WorkerPool, world: int, keywords: dict[str, Any]) -> None:
    x, towards = torch.randn(24, 16), torch.randn(24, 16)
    torch.manual_seed(4)
    moe = own.MoE(16, 24, 8, 2, shared_size=8)
    given = x.clone().requires_grad_()
    rest = [parameter for name, parameter in moe.named_parameters() if name not in ("up", "down")]
    expected = gradients(moe(given), [given, moe.up, moe.down, *rest], towards)
    for found in pool.call(ranks.mixture, world, x, towards, keywords):
        close(found, expected)


def test_tokens_that_are_sent_again_are_not_kept(pool: WorkerPool) -> None:
    everything, first, nothing = (
        sum(pool.call(ranks.kept_by_a_mixture, 2, {"zero_memory": level})) for level in (None, "level0", "level1")
    )
    rows = 2 * 64 * 2  # of two ranks, 64 tokens to two experts
    assert everything - first >= rows * 16 * 4  # the received tokens, fp32
    assert first - nothing >= rows * 48 * 4  # the products


@pytest.mark.parametrize("world", WORLDS)
def test_loss_with_split_classes_is_that_of_one_process(pool: WorkerPool, world: int) -> None:
    hidden, target = torch.randn(2, 8, 16), torch.randint(24, (2, 8))
    torch.manual_seed(5)
    loss = own.LinearCrossEntropyLoss(16, 24)
    given = hidden.clone().requires_grad_()
    expected = gradients(loss(given, target), [given, loss.linear.weight])
    for found in pool.call(ranks.loss_over_classes, world, hidden, target):
        close(found, expected)


def test_a_wrapper_of_torch_averages_the_gradients(pool: WorkerPool) -> None:
    x = torch.randn(2, 16, 16)
    wrapped, plain = (pool.call(ranks.data_parallel, 2, x, wrapped) for wrapped in (True, False))
    for found, expected in zip(wrapped, plain, strict=True):
        close(found, expected)


def test_error_names_the_number_that_would_do(pool: WorkerPool) -> None:
    calls = [
        ("ContextParallelAttention", (), {"mesh": "square"}),
        ("ColumnParallelLinear", (8, 7), {"mesh": "world"}),
        ("MoE", (8, 8, 3, 1), {"mesh": "world"}),
        ("MoE", (8, 8, 4, 1), {"mesh": "world", "zero_memory": "level2"}),
        ("MoE", (8, 8, 4, 1), {"mesh": "world", "zero_memory": "level0", "dispatcher": "allgather"}),
        ("ContextParallelAttention", (), {"mesh": "world", "shard": torch.zeros(1, 6, 1, 1)}),
        ("ContextParallelAttention", (), {"mesh": "world", "algorithm": "hybrid", "inner": 3}),
    ]
    (found, _) = pool.call(ranks.refusals, 2, calls)
    assert found == [
        ("ContextParallelAttention: the mesh has 2 dimensions ('dp', 'cp'), but 1 is needed", 'pass mesh["cp"]'),
        (
            "ColumnParallelLinear: 7 output features are not divisible by 2 ranks",
            "use 6 or 8 output features, or fewer ranks",
        ),
        ("MoE: 3 experts are not divisible by 2 ranks", "use 2 or 4 experts, or fewer ranks"),
        ("MoE: no zero_memory 'level2'", "use one of level0, level1"),
        ("MoE: the dispatcher allgather cannot send tokens again for zero_memory", "pass dispatcher='alltoall'"),
        (
            "ContextParallelAttention.shard: 6 tokens are not divisible by 4 chunks",
            "use 4 or 8 tokens, or fewer chunks",
        ),
        ("ContextParallelAttention: inner=3 does not divide 2 ranks", "pass inner=1 or 2"),
    ]
