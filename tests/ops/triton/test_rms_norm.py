import pytest
import torch

from mindspeed.ops import rms_norm, rms_norm_residual
from tests.ops.operator_checks import strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf, on_triton

WHOLE = {"forward", "backward", "column_sums"}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 33), (37, 128), (5, 700), (4, 8200)])
def test_it_is_like_the_reference_forward_and_backward(rows, width, dtype):
    assert_like_reference(rms_norm, leaf(rows, width, dtype=dtype), leaf(width, dtype=dtype, seed=2), kernels=WHOLE)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_norm_of_a_sum_gives_the_sum_and_takes_its_gradient(dtype):
    inputs = leaf(2, 17, 96, dtype=dtype), leaf(2, 17, 96, dtype=dtype, seed=2), leaf(96, dtype=dtype, seed=3)
    assert_like_reference(rms_norm_residual, *inputs, kernels=WHOLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_too_long_to_be_held_are_read_in_pieces(dtype):
    x, residual, gamma = leaf(3, 16401, dtype=dtype), leaf(3, 16401, dtype=dtype, seed=2), leaf(16401, dtype=dtype, seed=3)
    long = {"forward_long", "backward_long", "gamma_long", "column_sums"}
    assert_like_reference(rms_norm, x, gamma, kernels=long)
    assert_like_reference(rms_norm_residual, x, residual, gamma, kernels=long)


def test_several_trailing_dimensions_and_strides_are_taken():
    assert_like_reference(rms_norm, leaf(4, 3, 5), leaf(3, 5, seed=2), kernels=WHOLE)
    x, gamma = strided(6, 3, 20, dtype=torch.float32), strided(20, dtype=torch.float32, seed=2)
    assert_like_reference(rms_norm, x, gamma, kernels=WHOLE)


def test_without_rows_nothing_runs_and_the_gradient_of_gamma_is_zero():
    assert_like_reference(rms_norm, leaf(0, 8), leaf(8, seed=2), kernels={"column_sums"})


def test_fp64_and_rows_of_nothing_are_left_to_the_reference():
    assert_like_reference(rms_norm, leaf(0, 0), leaf(0, seed=2), kernels=set())
    assert_like_reference(rms_norm, leaf(3, 8, dtype=torch.float64), leaf(8, dtype=torch.float64), kernels=set(), tolerance=0)


def test_it_takes_inference_mode_and_a_second_use_under_recompute():
    x, gamma = leaf(3, 40), leaf(40, seed=2)
    expected = rms_norm(x, gamma)
    with on_triton(), torch.inference_mode():
        torch.testing.assert_close(rms_norm(x, gamma), expected.detach())
