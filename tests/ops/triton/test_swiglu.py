import pytest
import torch

from mindspeed.ops import swiglu
from tests.ops.operator_checks import strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf

BOTH = {"forward", "backward"}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 66), (3, 5, 256), (2, 8400)])
def test_it_is_like_the_reference_forward_and_backward(shape, dtype):
    assert_like_reference(swiglu, leaf(*shape, dtype=dtype), kernels=BOTH)


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_it_takes_every_dimension(dim):
    assert_like_reference(lambda x: swiglu(x, dim), leaf(4, 6, 10), kernels=BOTH)


def test_strides_and_no_elements_are_taken():
    assert_like_reference(swiglu, strided(3, 4, 12, dtype=torch.float32), kernels=BOTH)
    assert_like_reference(swiglu, leaf(0, 8), kernels=set())


def test_fp64_is_left_to_the_reference():
    assert_like_reference(swiglu, leaf(3, 8, dtype=torch.float64), kernels=set(), tolerance=0)
