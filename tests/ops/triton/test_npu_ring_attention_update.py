import pytest
import torch

from mindspeed.ops import npu_ring_attention_update
from tests.ops.operator_checks import refused
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf, on_triton


def sides(out, stats, dtype):
    """Two results with their statistics; some rows are seen by one side only, one by neither."""
    sides = []
    for seed in (1, 5):
        maximum, total = leaf(*stats, seed=seed + 1, grad=False), leaf(*stats, seed=seed + 2, grad=False).exp()
        sides.append([leaf(*out, dtype=dtype, seed=seed, grad=False), maximum, total])
    for n, side in enumerate(sides):
        rows = side[1].flatten(0, -2)
        for hidden in (0, n + 1):
            rows[hidden % len(rows)] = -torch.inf
            side[2].view(rows.shape)[hidden % len(rows)] = 0
    return [*sides[0], *sides[1]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lanes", [8, 1, 3])
def test_sbh_is_like_the_reference(lanes, dtype):
    tensors = sides((7, 2, 3 * 10), (2, 3, 7, lanes), dtype)
    assert_like_reference(npu_ring_attention_update, *tensors, kernels={"merge"})


@pytest.mark.parametrize("dtype", TYPES)
def test_packed_sequences_are_like_the_reference_in_both_orders(dtype):
    tensors = sides((9, 3, 20), (9, 3, 8), dtype)
    for ends in ([4, 4, 9], [0, 2, 9], torch.tensor([9])):
        call = lambda *t, ends=ends: npu_ring_attention_update(*t, ends, "TND")  # noqa: E731
        assert_like_reference(call, *tensors, kernels={"merge"})
    by_token = lambda *t: npu_ring_attention_update(*t, None, "TND", "TND")  # noqa: E731
    assert_like_reference(by_token, *tensors, kernels={"merge"})


def test_heads_wider_than_a_tile_are_taken():
    assert_like_reference(npu_ring_attention_update, *sides((2, 1, 4100), (1, 1, 2, 8), torch.float32), kernels={"merge"})


def test_fp64_and_no_tokens_are_left_to_the_reference():
    tensors = [t.double() for t in sides((3, 1, 4), (1, 1, 3, 8), torch.float32)]
    assert_like_reference(npu_ring_attention_update, *tensors, kernels=set(), tolerance=1e-15)
    empty = [leaf(*s, grad=False) for s in ((0, 1, 4), (1, 1, 0, 8), (1, 1, 0, 8))]
    assert_like_reference(npu_ring_attention_update, *empty, *empty, kernels=set())


def test_lengths_that_do_not_end_at_the_tokens_are_refused():
    tensors = sides((9, 3, 20), (9, 3, 8), torch.float32)
    with on_triton(), refused("npu_ring_attention_update: actual_seq_qlen ends at 8, not at 9"):
        npu_ring_attention_update(*tensors, [4, 8], "TND")
