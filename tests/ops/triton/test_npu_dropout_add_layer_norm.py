import pytest
import torch

from mindspeed.ops import npu_dropout_add_layer_norm, npu_dropout_add_rms_norm
from tests.ops.operator_checks import strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf

BOTH = {"forward", "backward", "column_sums"}


def normed(function, p=0.0, **options):
    """A call that gives the result and z; the dropout mask is drawn from the same seed each time."""

    def call(x, residual, weight, bias, *scales):
        torch.manual_seed(4)
        return function(x, residual, weight, bias, p, 1e-5, *scales, prenorm=True, return_dropout_mask=True, **options)

    return call


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_layer_norm_with_everything_is_like_the_reference(p, dtype):
    inputs = leaf(3, 5, 70, dtype=dtype), leaf(3, 5, 70, dtype=dtype, seed=2), leaf(70, seed=3), leaf(70, seed=4)
    scales = leaf(3, 5, dtype=dtype, seed=5), leaf(70, seed=6)
    assert_like_reference(normed(npu_dropout_add_layer_norm, p), *inputs, *scales, kernels=BOTH)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_rms_norm_is_like_the_reference(p, dtype):
    inputs = leaf(9, 33, dtype=dtype), leaf(9, 33, dtype=dtype, seed=2), leaf(33, dtype=dtype, seed=3)
    assert_like_reference(normed(npu_dropout_add_rms_norm, p), *inputs, None, kernels=BOTH)


@pytest.mark.parametrize("scales", [(), (True, False), (False, True)])
def test_every_input_may_be_missing(scales):
    x, weight = leaf(7, 20), leaf(20, seed=3)
    given = [made if wanted else None for made, wanted in zip((leaf(7, seed=5), leaf(20, seed=6)), scales, strict=False)]
    call = normed(npu_dropout_add_layer_norm, 0.2)
    assert_like_reference(lambda *t: call(t[0], None, t[1], None, *t[2:]), x, weight, *given, kernels=BOTH)


@pytest.mark.parametrize("fp32", [False, True])
def test_z_is_in_the_type_of_the_residual_or_in_fp32(fp32):
    x, weight, bias = leaf(7, 130, dtype=torch.bfloat16), leaf(130, seed=3), leaf(130, seed=4)
    call = normed(npu_dropout_add_layer_norm, residual_in_fp32=fp32)
    assert_like_reference(lambda x, w, b: call(x, None, w, b), x, weight, bias, kernels=BOTH)
    residual = leaf(7, 130, seed=2)
    assert_like_reference(call, x, residual, weight, bias, kernels=BOTH)


def test_strides_no_rows_and_one_column_are_taken():
    x, residual = strided(4, 6, 20, dtype=torch.float32), strided(4, 6, 20, dtype=torch.float32, seed=2)
    assert_like_reference(normed(npu_dropout_add_layer_norm), x, residual, leaf(20, seed=3), leaf(20, seed=4), kernels=BOTH)
    call = normed(npu_dropout_add_layer_norm)
    assert_like_reference(call, leaf(0, 8), None, leaf(8, seed=3), leaf(8, seed=4), kernels={"column_sums"})
    assert_like_reference(call, leaf(3, 1), None, leaf(1, seed=3), leaf(1, seed=4), kernels=BOTH)


def test_fp64_and_rows_wider_than_8192_are_left_to_the_reference():
    call = normed(npu_dropout_add_layer_norm)
    double = leaf(3, 8, dtype=torch.float64), None, leaf(8, dtype=torch.float64), leaf(8, dtype=torch.float64)
    assert_like_reference(call, *double, kernels=set(), tolerance=0)
    assert_like_reference(call, leaf(2, 8193), None, leaf(8193, seed=3), leaf(8193, seed=4), kernels=set(), tolerance=0)
