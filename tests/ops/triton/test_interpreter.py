"""bf16 in Triton's interpreter, as `mindspeed.ops.triton.launch` repairs it, is bf16 of torch."""

import torch
import triton
import triton.language as tl

import mindspeed.ops.triton.launch  # noqa: F401  it repairs the interpreter
from tests.ops.triton.kernels import leaf


@triton.jit
def convert(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def multiply(a, b, c, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_fp32_is_rounded_to_the_nearest_bf16_and_back_exactly():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.39e38, 1e-40, -1e-45, 1.00390625, 1.01171875])
    x = torch.cat((special, leaf(246, grad=False)))
    y, back = torch.empty(256, dtype=torch.bfloat16), torch.empty(256)
    convert[(1,)](x, y, SIZE=256)
    assert torch.equal(y.view(torch.int16), x.bfloat16().view(torch.int16))
    convert[(1,)](y, back, SIZE=256)
    torch.testing.assert_close(back, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_matrices_of_bf16_are_multiplied_as_numbers():
    a, b = (leaf(16, 16, dtype=torch.bfloat16, seed=seed, grad=False) for seed in (1, 2))
    c = torch.empty(16, 16)
    multiply[(1,)](a, b, c, SIZE=16)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
