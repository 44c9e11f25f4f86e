"""The C++ kernels of streaming operators, their plain-torch references, and arguments for both."""

from importlib import import_module

import pytest
import torch

from mindspeed.ops import native_library

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

import_module("mindspeed.ops.registration")
needs_library = pytest.mark.skipif(
    native_library.loaded() is None, reason="the C++ operators are not built: mindspeed ops build"
)


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shuffled(*shape, dtype=torch.float32, seed=1):
    """Like normal, with a gap after each row and the first two dimensions exchanged in memory."""
    swapped = (shape[1], shape[0], *shape[2:-1], shape[-1] + 3) if len(shape) > 2 else (*shape[:-1], shape[-1] + 3)
    wide = normal(*swapped, dtype=dtype, seed=seed)
    return (wide.transpose(0, 1) if len(shape) > 2 else wide)[..., : shape[-1]]


def tensors(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def assert_like_reference(schema, reference, *args, ulps=2.0):
    """Kernel and reference give the same shapes, strides and types, and values within `ulps` of the largest value.

    Arguments are about one, so that a result which is all but zero (a mean) is held to a tenth. ``ulps=0`` asks for the
    same bits.
    """
    module, _, function = reference.partition(":")
    expected = tensors(getattr(import_module(f"mindspeed.ops.{module}"), function)(*args))
    got = tensors(getattr(torch.ops.mindspeed, schema)(*args))
    assert len(got) == len(expected)
    for value, wanted in zip(got, expected, strict=True):
        assert (value.shape, value.dtype, value.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        if ulps == 0:
            assert torch.equal(value, wanted)
        else:
            largest = wanted.double().nan_to_num(0, 0, 0).abs().max().item() if wanted.numel() else 0.0
            tolerance = ulps * ULP[wanted.dtype] * max(largest, 0.1)
            torch.testing.assert_close(value.double(), wanted.double(), rtol=0, atol=tolerance, equal_nan=True)
