import pytest
import torch

from mindspeed.ops import npu_rotary_position_embedding
from tests.ops.operator_checks import strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf


def turned(mode):
    return lambda x, cos, sin: npu_rotary_position_embedding(x, cos, sin, mode)


def tables(*shape, dtype=torch.float32):
    return leaf(*shape, dtype=dtype, seed=2, grad=False), leaf(*shape, dtype=dtype, seed=3, grad=False)


LAYOUTS = {
    "SBND": ((5, 2, 3, 16), (5, 1, 1, 16)),
    "BSND": ((2, 5, 3, 16), (1, 5, 1, 16)),
    "BNSD": ((2, 3, 5, 16), (1, 1, 5, 16)),
    "BNSD by batch": ((2, 3, 5, 16), (2, 1, 5, 16)),
    "full": ((2, 3, 5, 16), (2, 3, 5, 16)),
    "no table for any": ((2, 3, 5, 16), (1, 1, 1, 16)),
    "TND": ((7, 3, 16), (7, 1, 16)),
    "one vector": ((6,), (6,)),
    "odd half": ((3, 2, 4, 26), (3, 1, 1, 26)),
    "many heads": ((2, 1, 300, 34), (2, 1, 1, 34)),
}


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_like_the_reference_in_every_layout(layout, mode):
    shape, table = LAYOUTS[layout]
    assert_like_reference(turned(mode), leaf(*shape), *tables(*table), kernels={"turn"})


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("table", [torch.float32, None])
def test_it_is_like_the_reference_in_every_type(table, dtype, mode):
    x = leaf(4, 2, 5, 64, dtype=dtype)
    assert_like_reference(turned(mode), x, *tables(4, 1, 1, 64, dtype=table or dtype), kernels={"turn"})


@pytest.mark.parametrize("mode", [0, 1])
def test_strides_are_taken_as_they_are(mode):
    x = strided(5, 2, 3, 16, dtype=torch.float32)
    assert_like_reference(turned(mode), x, *tables(5, 1, 1, 16), kernels={"turn"})
    wider = leaf(5, 2, 3, 48, grad=False)[..., 16:32].requires_grad_()
    assert_like_reference(turned(mode), wider, *tables(5, 1, 1, 16), kernels={"turn"})


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_tables_are_like_the_reference(layout, mode):
    shape, table = LAYOUTS[layout]
    x, cos, sin = leaf(*shape), leaf(*table, seed=2), leaf(*table, seed=3)
    ran = {"turn"} if layout == "full" else {"turn", "table_gradients"}
    assert_like_reference(turned(mode), x, cos, sin, kernels=ran)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_the_tables_have_their_type(dtype):
    x = strided(5, 2, 3, 16, dtype=dtype)
    for table in (dtype, torch.float32):
        cos, sin = leaf(5, 1, 1, 16, dtype=table, seed=2), leaf(5, 1, 1, 16, dtype=table, seed=3)
        assert_like_reference(turned(0), x, cos, sin, kernels={"turn", "table_gradients"})


def test_five_dimensions_and_no_elements_run_the_reference():
    assert_like_reference(turned(0), leaf(2, 2, 2, 2, 4), *tables(1, 2, 1, 1, 4), kernels=set(), tolerance=0)
    assert_like_reference(turned(0), leaf(0, 2, 2, 4), *tables(1, 1, 1, 4), kernels=set())
