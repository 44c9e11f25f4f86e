from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_rotary_position_embedding
from tests.ops.native.kernels import TYPES, assert_like_reference, needs_library, normal, shuffled
from tests.ops.operator_checks import assert_holds_everywhere

pytestmark = needs_library

NAME = "npu_rotary_position_embedding"
BROADCASTS = [
    ((2, 3, 5, 64), (1, 1, 5, 64)),
    ((2, 3, 5, 64), (2, 1, 5, 64)),
    ((2, 5, 3, 96), (1, 5, 1, 96)),
    ((5, 2, 3, 6), (5, 1, 1, 6)),
    ((5, 2, 3, 128), (5, 2, 3, 128)),
    ((4, 2, 3, 34), (1, 1, 1, 34)),
    ((10,), (10,)),
    ((0, 2, 3, 8), (1, 1, 3, 8)),
]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide_tables", [False, True])
@pytest.mark.parametrize(("shape", "table"), BROADCASTS)
def test_it_gives_the_bits_of_the_reference(shape, table, wide_tables, dtype, mode):
    table_type = torch.float32 if wide_tables else dtype
    cos, sin = normal(*table, dtype=table_type, seed=2), normal(*table, dtype=table_type, seed=3)
    for make in (normal, shuffled):
        x = make(*shape, dtype=dtype)
        assert_like_reference(NAME, f"{NAME}:_forward", x, cos, sin, mode, ulps=0)
        assert_like_reference(f"{NAME}_backward", f"{NAME}:_backward", x, cos, sin, mode, ulps=0)


@pytest.mark.parametrize("tables_too", [False, True])
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(tables_too):
    x = normal(2, 3, 5, 8, dtype=torch.bfloat16).requires_grad_()
    cos, sin = (normal(1, 1, 5, 8, dtype=torch.bfloat16, seed=seed).requires_grad_(tables_too) for seed in (2, 3))
    assert_holds_everywhere(npu_rotary_position_embedding, x, cos, sin)


def test_it_is_registered_as_pytorch_wants_it():
    x, cos, sin = shuffled(2, 3, 5, 8).requires_grad_(), normal(1, 1, 5, 8, seed=2), normal(1, 1, 5, 8, seed=3)
    torch.library.opcheck(torch.ops.mindspeed.npu_rotary_position_embedding.default, (x, cos, sin.requires_grad_(), 1))
