from __future__ import annotations

import pytest
import torch

from mindspeed.ops import rms_norm, rms_norm_residual
from tests.ops.native.kernels import TYPES, assert_like_reference, needs_library, normal, shuffled
from tests.ops.operator_checks import assert_holds_everywhere

pytestmark = needs_library

SHAPES = [
    ((512, 128), (128,)),
    ((7, 33), (33,)),
    ((3, 5, 2, 6), (2, 6)),
    ((1, 70001), (70001,)),
    ((130, 1), (1,)),
    ((5,), (5,)),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "norm"), [*SHAPES, ((0, 8), (8,)), ((3, 0), (0,))])
@pytest.mark.parametrize("make", [normal, shuffled])
def test_it_gives_what_the_reference_gives(shape, norm, dtype, make):
    x, residual, dy, dsum = (make(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3, 4))
    gamma = normal(*norm, dtype=dtype, seed=5)
    rstd = normal(*shape[: len(shape) - len(norm)], *(1 for _ in norm), seed=6).abs()
    assert_like_reference("rms_norm", "rms_norm:_forward", x, gamma, 1e-6)
    assert_like_reference("rms_norm_residual", "rms_norm:_residual_forward", x, residual, gamma, 1e-6)
    assert_like_reference("rms_norm_backward", "rms_norm:_backward", dy, x, gamma, rstd, ulps=4)
    args = (dy, dsum, x, gamma, rstd)
    assert_like_reference("rms_norm_residual_backward", "rms_norm:_residual_backward", *args, ulps=4)


def test_the_gradient_of_gamma_does_not_depend_on_the_number_of_threads():
    x, dy, gamma, rstd = normal(300, 500), normal(300, 500, seed=2), normal(500, seed=3), torch.ones(300, 1)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.ops.mindspeed.rms_norm_backward(dy, x, gamma, rstd)[1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_results_past_the_caches_are_the_same():
    rows, width = 1100, 8192  # 34 MiB in fp32
    x, gamma = normal(rows, width), normal(width, seed=2)
    y, rstd = torch.ops.mindspeed.rms_norm(x, gamma, 1e-6)
    half, _ = torch.ops.mindspeed.rms_norm(x[: rows // 2], gamma, 1e-6)
    assert torch.equal(y[: rows // 2], half)
    dx, _ = torch.ops.mindspeed.rms_norm_backward(x, x, gamma, rstd)
    assert torch.equal(dx[:512], torch.ops.mindspeed.rms_norm_backward(x[:512], x[:512], gamma, rstd[:512])[0])


def test_fp64_runs_the_reference():
    x, gamma = normal(3, 8).double(), normal(8).double()
    assert_like_reference("rms_norm", "rms_norm:_forward", x, gamma, 1e-6, ulps=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(dtype):
    inputs = [t.requires_grad_() for t in (normal(4, 6, dtype=dtype), normal(4, 6, dtype=dtype, seed=2))]
    gamma = normal(6, dtype=dtype, seed=3).requires_grad_()
    assert_holds_everywhere(rms_norm, inputs[0], gamma)
    assert_holds_everywhere(rms_norm_residual, *inputs, gamma)


def test_it_is_registered_as_pytorch_wants_it():
    x, gamma = normal(3, 4, 8).requires_grad_(), normal(8, seed=2).requires_grad_()
    torch.library.opcheck(torch.ops.mindspeed.rms_norm.default, (x, gamma, 1e-6))
    torch.library.opcheck(torch.ops.mindspeed.rms_norm_residual.default, (x, shuffled(3, 4, 8), gamma, 1e-6))
