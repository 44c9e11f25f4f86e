from __future__ import annotations

import pytest
import torch

from mindspeed.ops import swiglu
from tests.ops.native.kernels import TYPES, assert_like_reference, needs_library, normal, shuffled
from tests.ops.operator_checks import assert_holds_everywhere

pytestmark = needs_library


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [normal, shuffled])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 64), -1), ((3, 34, 7), 1), ((6, 4, 1), 0), ((2, 3, 778), 2), ((1, 20002), -1), ((0, 8), 1), ((3, 0), 1), ((2,), 0)],
)
def test_it_gives_what_the_reference_gives(shape, dim, dtype, make):
    x = 4 * make(*shape, dtype=dtype)
    half = [size // 2 if d == dim % len(shape) else size for d, size in enumerate(shape)]
    assert_like_reference("swiglu", "swiglu:_forward", x, dim)
    assert_like_reference("swiglu_backward", "swiglu:_backward", make(*half, dtype=dtype, seed=2), x, dim, ulps=4)


def test_extreme_gates_stay_finite():
    gates = torch.tensor([-200.0, -100.0, -88.0, -87.0, -50.0, 0.0, 50.0, 100.0, 3e38])
    x = torch.stack((gates, torch.ones_like(gates)), -1)
    assert_like_reference("swiglu", "swiglu:_forward", x, -1)
    assert torch.ops.mindspeed.swiglu(x, -1).isfinite().all()
    torch.testing.assert_close(
        torch.ops.mindspeed.swiglu(x[:8], -1)[:, 0], gates[:8] * gates[:8].sigmoid(), rtol=1e-6, atol=1e-35
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_same_compiled_recomputed_and_in_inference_mode(dtype):
    assert_holds_everywhere(swiglu, normal(3, 8, dtype=dtype).requires_grad_())


def test_it_is_registered_as_pytorch_wants_it():
    torch.library.opcheck(torch.ops.mindspeed.swiglu.default, (shuffled(3, 4, 8).requires_grad_(), -1))
    torch.library.opcheck(torch.ops.mindspeed.swiglu_backward.default, (normal(3, 4), normal(3, 8), 1))
