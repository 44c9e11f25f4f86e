from __future__ import annotations

import pytest
import torch

from tests.ops.native.kernels import TYPES, assert_like_reference, needs_library, normal

pytestmark = needs_library

NAME = "npu_ring_attention_update"


def sides(s, b, n, d, lanes, dtype):
    """Two results in SBH; the first token was seen by neither side, the second and third by one."""
    results = []
    for seed, hidden in ((1, slice(0, 2)), (2, slice(0, 3, 2))):
        maximum, total = 3 * normal(b, n, s, 1, seed=seed + 10), normal(b, n, s, 1, seed=seed + 20).abs()
        maximum[:, :, hidden], total[:, :, hidden] = -torch.inf, 0
        stats = (stat.repeat(1, 1, 1, lanes) for stat in (maximum, total))
        results += [normal(s, b, n * d, dtype=dtype, seed=seed), *stats]
    return results


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 2, 3, 4, 8), (70, 1, 4, 64, 8), (33, 3, 2, 20, 1)])
def test_it_gives_what_the_reference_gives(shape, dtype):
    results = sides(*shape, dtype)
    assert_like_reference(NAME, f"{NAME}:_forward", *results, None, "SBH")
    s, b, n, d, lanes = shape
    tokens = s * b
    packed = [t.reshape(tokens, n, d) if t.dim() == 3 else t.transpose(1, 2).reshape(tokens, n, lanes) for t in results]
    for ends in (None, torch.tensor([2, 2, tokens]), torch.tensor([0, tokens])):
        assert_like_reference(NAME, f"{NAME}:_forward", *packed, ends, "TND")


def test_statistics_in_fp64_run_the_reference():
    results = [t.double() for t in sides(5, 2, 3, 4, 8, torch.float32)]
    assert_like_reference(NAME, f"{NAME}:_forward", *results, None, "SBH", ulps=0)


def test_it_is_registered_as_pytorch_wants_it():
    results = sides(5, 2, 3, 4, 8, torch.float32)
    torch.library.opcheck(torch.ops.mindspeed.npu_ring_attention_update.default, (*results, None, "SBH"))
