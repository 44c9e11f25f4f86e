"""Gradients of keys and values that a ring sends in bf16: their bound, and the bytes."""

import pytest
import torch
from torch import Tensor

import mindspeed
from mindspeed.context_parallel import costs
from mindspeed.context_parallel.layout import zigzag
from mindspeed.platforms.collectives import traffic
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, attend, causal, made, reference, shape

RING = "mindspeed.context_parallel.ring:ring_attention"
UNIT = 2.0**-8
"""The relative error of a number that is rounded to bf16."""


def sent_by(world: int, tensors: list[Tensor], narrow: bool) -> tuple[list[Tensor], int]:
    """Result and gradients of this rank's share, and the bytes that it sends."""
    with traffic() as moved:
        results = attend(RING, zigzag(world), tensors, {"narrow_gradients": narrow})
    return results, moved.total("send").bytes


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_hop_rounds_the_sum_so_far_and_sends_two_bytes_of_a_number(pool: WorkerPool, world: int) -> None:
    tensors, layout = made(world * 8, 2, 4, 2, 8, 4, torch.bfloat16), zigzag(world)
    plan = mindspeed.plan(features=[], platform="cpu")
    wide, narrow = (pool.call(sent_by, world, world, tensors, how, plan=plan) for how in (False, True))
    assert_like_dense([results for results, _ in narrow], layout, reference(tensors, causal(world * 8)))
    *inputs, dout = tensors
    by_rank = []
    for rank in range(world):  # what the queries of one rank add to the gradients of keys and values
        own = layout.restore([layout.take(dout, other) * (other == rank) for other in range(world)])
        by_rank.append(reference([*inputs, own], causal(world * 8)))
    for number in (2, 3):
        theirs, ours = (layout.restore([results[number] for results, _ in run]).double() for run in (wide, narrow))
        largest = torch.stack([gradients[number].abs() for gradients in by_rank]).sum(0)
        bound = (world - 1) * UNIT * 1.05 * largest + 2 * UNIT * theirs.abs()  # both are rounded at the end
        assert bool(((ours - theirs).abs() <= bound).all())
        if world > 2:  # what one rank adds has the type of the keys already
            assert not torch.equal(ours, theirs)
    a = shape(tensors, world)
    for runs, how in ((wide, False), (narrow, True)):
        assert {sent for _, sent in runs} == {costs.ring(a, world, narrow_gradients=how).both}
