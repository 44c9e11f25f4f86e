from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_dropout_add_layer_norm, npu_dropout_add_rms_norm
from tests.ops.native.kernels import TYPES, assert_like_reference, needs_library, normal, shuffled
from tests.ops.operator_checks import assert_holds_everywhere

pytestmark = needs_library

NAME = "npu_dropout_add_layer_norm"


def arguments(shape, dtype, sum_type, rms, full, make):
    """Arguments of the forward: with everything that may be absent, or with nothing of it."""
    width, rows = shape[-1:], shape[:-1]
    mask = (normal(*shape, seed=9) > -0.5).to(torch.uint8)
    x0, weight = make(*shape, dtype=dtype), normal(*width, dtype=dtype, seed=2)
    residual, rowscale = make(*shape, dtype=sum_type, seed=3), normal(*rows, dtype=dtype, seed=4)
    bias, layerscale = normal(*width, dtype=dtype, seed=5), normal(*width, dtype=dtype, seed=6)
    optional = (residual, weight, None if rms else bias, rowscale, layerscale, mask) if full else (None, weight, *[None] * 4)
    return (x0, *optional, 0.3 if full else 0.0, 1e-5, sum_type, rms)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 64), (2, 37, 7), (5, 8), (300, 100), (0, 8), (3, 20001)])
def test_it_gives_what_the_reference_gives(shape, full, rms, dtype):
    for make in (normal, shuffled):
        for sum_type in {dtype, torch.float32}:
            args = arguments(shape, dtype, sum_type, rms, full, make)
            assert_like_reference(NAME, f"{NAME}:_forward", *args, ulps=4)
            z, weight, rowscale, layerscale, mask = normal(*shape, dtype=sum_type, seed=11), args[2], *args[4:7]
            mean, rstd = (0 if rms else 1) * normal(*shape[:-1], 1, seed=12), normal(*shape[:-1], 1, seed=13).abs()
            dz = make(*shape, dtype=sum_type, seed=14) if full else torch.zeros((), dtype=sum_type).expand(shape)
            rest = (None, rowscale, layerscale, mask, args[7], rms)
            dout = make(*shape, dtype=dtype, seed=15)
            assert_like_reference(f"{NAME}_backward", f"{NAME}:_backward", dout, dz, z, weight, mean, rstd, *rest, ulps=4)


@pytest.mark.parametrize("call", [npu_dropout_add_layer_norm, npu_dropout_add_rms_norm])
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(call):
    inputs = [normal(2, 3, 8, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (1, 2)]
    weight = normal(8, dtype=torch.bfloat16, seed=3).requires_grad_()
    assert_holds_everywhere(
        lambda x0, residual, weight: call(x0, residual, weight, None, 0.0, 1e-5, prenorm=True), *inputs, weight
    )


def test_it_is_registered_as_pytorch_wants_it():
    args = arguments((2, 3, 8), torch.float32, torch.float32, False, True, shuffled)
    torch.library.opcheck(torch.ops.mindspeed.npu_dropout_add_layer_norm.default, args)
