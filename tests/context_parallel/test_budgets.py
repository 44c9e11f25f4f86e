"""Kernels and bytes of attention beside the calls of torch_npu, against those calls alone."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mindspeed.context_parallel import blocks
from mindspeed.context_parallel.blocks import Scoring, accumulate_block, parts, start, statistics
from mindspeed.context_parallel.local_attention import add_gradients, attention
from mindspeed.features.ring_attention_update import layers
from mindspeed.ops import fusion_attention
from mindspeed.ops.attention_mask import attention_visibility, compressed_mask
from mindspeed.ops.fusion_attention import LANES, LANES_OF
from tests.npu_contract import attention_bodies, bodies
from tests.npu_contract.beside import Beside, count

LENGTH, HEADS, WIDTH = 512, 4, 128


@pytest.fixture(scope="module", autouse=True)
def _npu() -> Iterator[None]:
    with bodies.installed(attention_bodies.BODIES), patch.dict(LANES_OF, cpu=LANES):
        compressed_mask(torch.device("cpu"))
        yield


def made() -> list[Tensor]:
    return [torch.randn(LENGTH, 1, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def both_ways(call: Callable[..., Tensor]) -> tuple[Beside, Beside]:
    """What forward and backward of a call run beside its work."""
    tensors, results = made(), []
    forward = count(lambda: results.append(call(*tensors)))
    dout = torch.randn_like(results[0])
    return forward, count(lambda: torch.autograd.grad(results[0], tensors, dout))


def assert_within(found: Beside, kernels: int, share: float) -> None:
    assert found.direct > 0
    assert found.reads == 0
    assert found.kernels <= kernels, found
    assert found.share <= share, found


def test_the_operator_adds_nothing_to_the_call() -> None:
    def call(*tensors: Tensor) -> Tensor:
        more = {"scale": 0.1, "atten_mask": compressed_mask(tensors[0].device), "sparse_mode": 3}
        return fusion_attention(*(x.flatten(2) for x in tensors), HEADS, "SBH", **more)[0]

    forward, backward = both_ways(call)
    assert_within(forward, 0, 0.0)
    assert_within(backward, 0, 0.0)


@pytest.mark.parametrize("ends", [(), ((100, 300, LENGTH),)], ids=["one document", "packed documents"])
def test_attention_of_one_rank_is_one_call(ends: tuple[tuple[int, ...], ...]) -> None:
    """Ulysses attention, kv-allgather-cp with one tile, and eod-reset."""
    scoring = Scoring(0.1, attention_visibility(ends=ends))
    whole = [(0, LENGTH)]
    forward, backward = both_ways(lambda *x: attention(*x, scoring, whole, whole))
    assert_within(forward, 2, 0.02)
    assert_within(backward, 6 if ends else 4, 0.1)


def test_a_block_of_a_ring_is_merged_by_one_call() -> None:
    """What a block of keys costs: its result and its gradients are added to wide sums, and no more."""
    scoring, whole = Scoring(0.1, attention_visibility(causal=False)), [(0, LENGTH)]
    q, k, v = (x.detach() for x in made())
    running = start(q, WIDTH)
    (part,) = parts(scoring, whole, whole, q.device)
    with patch.object(blocks, "merge", layers.merge):
        first = count(lambda: accumulate_block(running, scoring, part, q, k, v))
        second = count(lambda: accumulate_block(running, scoring, part, q, k, v))
    assert_within(first, 3, 1.0)
    assert_within(second, 1, 0.3)
    dout, out = torch.randn_like(q), running.out.to(q.dtype)
    found, sums = statistics(running.statistics.lse), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    assert_within(count(lambda: add_gradients(sums, scoring, [part], dout, q, k, v, out, found)), 3, 1.1)
