"""Launching kernels: which tensors they take, on which device they run, and how large their tiles are."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
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


INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Floating-point types that the kernels compute with, in fp32; others are left to the reference."""

ROW: Final = 16384
"""Elements of a row that a kernel holds at once; a longer row is read in pieces."""
_TILE: Final = 4096
"""Elements that a program of a streaming kernel holds, unless one row has more."""

if INTERPRETED:
    repair()


def takes(*tensors: Tensor | None) -> bool:
    """Return whether the kernels compute with the types of all these tensors."""
    return all(x is None or x.dtype in TYPES for x in tensors)


def power(n: int) -> int:
    """The smallest power of two that is not less than ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def pieces(n: int, size: int) -> int:
    """Return the number of blocks of ``size`` that cover ``n``."""
    return -(-n // size)


def warps(elements: int) -> int:
    """Warps for a tile: 16 to 32 elements for each thread of a large one."""
    return min(16, max(4, elements // 1024))


def tile(width: int, rows: int) -> tuple[int, int]:
    """``(ROWS, COLUMNS)`` of a tile for rows of ``width``, both powers of two."""
    columns = min(power(width), _TILE)
    return min(max(_TILE // columns, 1), power(rows)), columns


@lru_cache(maxsize=64)
def cores(device: torch.device) -> int:
    """Programs that a device runs at the same time, one on each multiprocessor; few in the interpreter: loops go round."""
    if device.type == "cpu":
        return 3
    properties = torch.get_device_module(device).get_device_properties(device)
    count: int = getattr(properties, "multi_processor_count", 0) or getattr(properties, "cube_core_num", 0) or 32
    return count


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` programs of ``kernel`` on the device of its first argument, a tensor; none for none."""
    device = args[0].device
    if programs == 0:
        return
    if device.type == "cpu":
        kernel[(programs,)](*args, **constants)
        return
    module = torch.get_device_module(device)
    with nullcontext() if module.current_device() == device.index else module.device(device):
        kernel[(programs,)](*args, **constants)


def whole_rows(width: int, rows: int) -> tuple[int, int]:
    """``(ROWS, COLUMNS)`` of a tile that holds whole rows."""
    tall, wide = tile(width, rows)
    return tall, max(wide, power(width))
