"""Kernels in Triton's interpreter: two repairs, so that bf16 means there what it means on a device.

The interpreter (3.9) keeps bf16 as bit patterns in uint16. It rounds fp32 to bf16 towards zero, and multiplies the bit
patterns of bf16 matrices as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _to_bf16(values: Any) -> Any:
    """The bit patterns of fp32 values, rounded to the nearest, ties to even."""
    flat = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    return flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))


def _from_bf16(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def repair() -> None:
    """Replace the conversion and the matrix product of bf16; a second call changes nothing."""
    builder = InterpreterBuilder
    if getattr(builder, "_bf16_is_repaired", False):
        return
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        pair = source.dtype.scalar, wanted.scalar
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bf16(source.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(_from_bf16(source.data), tl.float32)
        return cast(self, source, wanted)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (TensorHandle(_from_bf16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    builder.cast_impl, builder.create_dot, builder._bf16_is_repaired = cast_impl, create_dot, True
