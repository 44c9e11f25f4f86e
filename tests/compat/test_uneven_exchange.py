"""Exchanges of sizes that the ranks do not divide, against the whole tensor, values and gradients."""

import torch
import torch.distributed as dist


def exchanged(shape, scatter, gather):
    """Whether exchanging there and back, splitting and gathering give what the whole tensor says, on this rank."""
    from mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp.mapping import (
        all_to_all,
        cal_split_sizes,
        gather_forward_split_backward,
        split_forward_gather_backward,
    )

    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    parts = {dim: torch.split(whole, cal_split_sizes(shape[dim], ranks), dim=dim) for dim in (scatter, gather)}
    mine = parts[gather][rank].clone().requires_grad_()
    out = all_to_all(mine, group, scatter_dim=scatter, gather_dim=gather, gather_size=shape[gather])
    torch.testing.assert_close(out, parts[scatter][rank], rtol=0, atol=0)
    out.backward(2 * out.detach())
    torch.testing.assert_close(mine.grad, 2 * mine.detach(), rtol=0, atol=0)

    entire = whole.clone().requires_grad_()
    part = split_forward_gather_backward(entire, group, gather)
    torch.testing.assert_close(part, parts[gather][rank], rtol=0, atol=0)
    again = gather_forward_split_backward(part, group, gather, cal_split_sizes(shape[gather], ranks))
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    again.backward(whole)
    torch.testing.assert_close(entire.grad, whole, rtol=0, atol=0)  # down by the ranks, then up
    return True


def test_uneven_sizes_are_exchanged_split_and_gathered_with_their_gradients(on_ranks):
    assert on_ranks(2, exchanged, [5, 7, 3], 0, 1) == [True, True]


def test_a_dimension_may_be_counted_from_the_end(on_ranks):
    assert on_ranks(2, exchanged, [4, 6, 5], -1, 1) == [True, True]
