"""What the tests of the C++ products and permutations share: the library or a skip, groups, comparison with the reference."""

from importlib import import_module

import pytest
import torch

import mindspeed.ops.registration  # noqa: F401  it loads the library
from mindspeed.ops import native_library

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-14}
"""Half a unit in the last place where numbers are rounded once; for fp32 and fp64 the order of long sums."""

SIZES = {
    "balanced": [40, 40, 40],
    "one row to one expert, nearly all to another": [1, 0, 301, 3],
    "first and last empty": [0, 5, 0, 130, 0],
    "no row": [0, 0],
}
SHAPES = [(1, 1), (3, 5), (64, 48), (65, 49), (130, 200), (7, 400), (0, 3)]
"""K and N: of one block, of several, of parts of tiles, odd, empty."""


def need(*operators: str) -> None:
    """Skip unless the library is built and holds these operators."""
    built = native_library.loaded()
    if built is None or not {*operators} <= {*built.operators}:
        pytest.skip(f"the C++ library is not built with {', '.join(operators)} here: mindspeed ops build")
    for operator in operators:
        reference(operator)  # importing it registers it


def reference(operator: str):
    """The module of the plain-torch reference."""
    return import_module(f"mindspeed.ops.{operator}")


def numbers(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def laid_out(x, layout):
    """``x`` with other strides: its last two dimensions swapped in memory, or every second number of a wider tensor."""
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x.repeat_interleave(2, -1)[..., ::2] if layout == "strided" else x


def assert_close(ours, theirs, tolerance):
    """Same type and shape, and no difference above ``tolerance`` times the largest number."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale)
