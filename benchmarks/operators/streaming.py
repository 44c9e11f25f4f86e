"""Speed of the streaming operators: bf16 and fp32 tensors of 4 and 16 MiB, forward and backward, against every peer.

Values are compared with the reference before anything is timed. `large` runs in a process of its own, in which the
allocator keeps what is freed, so that neither we nor a peer pay for fresh pages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.timing import COMMAND, Race, forward_backward, race
from benchmarks.operators.timing import rows as rows_of
from benchmarks.table import Row
from mindspeed.ops import (
    npu_dropout_add_layer_norm,
    npu_ring_attention_update,
    npu_rotary_position_embedding,
    rms_norm,
    rms_norm_residual,
    swiglu,
)

WIDTH: Final = 4096
HEADS: Final = 32
EPSILON: Final = 1e-6
SIZES: Final = (4, 16)
"""MiB of the first operand."""
LARGE: Final = 64
KEPT: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
"""What makes glibc reuse buffers of any size."""


def rows() -> list[Row]:
    """All rows: sizes and types, the large tensors, and the price of a call."""
    made = [row for dtype in (torch.bfloat16, torch.float32) for mib in SIZES for row in rows_at(mib, dtype)]
    return [*made, *_in_process("large"), dispatch()]


def rows_at(mib: int, dtype: torch.dtype) -> Iterator[Row]:
    for make in (_rms_norm, _rms_norm_residual, _swiglu, _rotary, _dropout, _ring):
        yield from make(mib, dtype)


def _what(name: str, mib: int, dtype: torch.dtype) -> str:
    return f"{name}, {mib} MiB {str(dtype).removeprefix('torch.')}"


def _tensor(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def _rows(mib: int, width: int, dtype: torch.dtype) -> int:
    return (mib << 20) // (width * dtype.itemsize)


def _same(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value.float(), expected.float(), rtol=2e-2, atol=1e-1)


def _plain_norm(x: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * gamma.float()).to(x.dtype)


def _compare(
    what: str,
    ours: Callable[..., Tensor],
    peers: dict[str, Callable[..., Tensor]],
    inputs: tuple[Tensor, ...],
    targets: dict[str, float],
    moved: float,
) -> list[Row]:
    """Forward and backward of one operator against its peers; the gradient is with respect to all inputs that ask for it.

    ``moved`` is what it has to read and write, as multiples of the first input.
    """
    for peer in peers.values():
        _same(ours(*inputs), peer(*inputs))
    wanted = tuple(t for t in inputs if t.requires_grad)
    run = {name: forward_backward(peer, *inputs, wanted=wanted) for name, peer in peers.items()}
    result = race(forward_backward(ours, *inputs, wanted=wanted), run)
    return rows_of(what, result, targets, _speed(result, moved * inputs[0].nbytes))


def _speed(result: Race, moved: float) -> str:
    """How long ours took, and how fast it went through its bytes."""
    seconds = result.seconds["ours"]
    rates = f"{moved / seconds / 1e9:.0f} GB/s of what it must read and write, a copy of 16 MiB {result.copy_rate / 1e9:.0f}"
    return f"{seconds * 1e3:.3f} ms, {rates}"


def _rms_norm(mib: int, dtype: torch.dtype) -> list[Row]:
    inputs = (_tensor(_rows(mib, WIDTH, dtype), WIDTH, dtype=dtype), _tensor(WIDTH, dtype=dtype))
    peers = {
        "torch.compile": torch.compile(_plain_norm),
        "F.rms_norm": lambda x, gamma: F.rms_norm(x, (WIDTH,), gamma, EPSILON),
        "eager": _plain_norm,
    }
    targets = {"torch.compile": 3.5, "F.rms_norm": 12.0}
    return _compare(_what("rms_norm f+b", mib, dtype), rms_norm, peers, inputs, targets, 5)


def _rms_norm_residual(mib: int, dtype: torch.dtype) -> list[Row]:
    shape = (_rows(mib, WIDTH, dtype), WIDTH)
    inputs = (_tensor(*shape, dtype=dtype), _tensor(*shape, dtype=dtype), _tensor(WIDTH, dtype=dtype))

    def plain(x: Tensor, residual: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _plain_norm(total, gamma), total

    given = (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))

    def trained(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(*inputs), inputs, given)

    _same(rms_norm_residual(*inputs)[0], plain(*inputs)[0])
    peers = {"torch.compile": trained(torch.compile(plain)), "eager": trained(plain)}
    result = race(trained(rms_norm_residual), peers)
    return rows_of(_what("rms_norm_residual f+b", mib, dtype), result, {}, _speed(result, 8 * inputs[0].nbytes))


def _swiglu(mib: int, dtype: torch.dtype) -> list[Row]:
    inputs = (_tensor(_rows(mib, 2 * WIDTH, dtype), 2 * WIDTH, dtype=dtype),)

    def wide(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return (F.silu(a) * b).to(x.dtype)

    def plain(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    peers = {"torch.compile": torch.compile(wide), "eager": plain}
    return _compare(_what("swiglu f+b", mib, dtype), swiglu, peers, inputs, {"torch.compile": 2.5}, 4)


def _rotary(mib: int, dtype: torch.dtype) -> list[Row]:
    length, depth = _rows(mib, WIDTH, dtype), WIDTH // HEADS
    x = _tensor(length, 1, HEADS, depth, dtype=dtype)
    tables = (_tensor(length, 1, 1, depth, dtype=dtype, grad=False) for _ in range(2))

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    peers = {"torch.compile": torch.compile(plain), "eager": plain}
    what = _what("npu_rotary_position_embedding f+b", mib, dtype)
    return _compare(what, npu_rotary_position_embedding, peers, (x, *tables), {"torch.compile": 2.0}, 4)


def _dropout(mib: int, dtype: torch.dtype) -> list[Row]:
    shape = (_rows(mib, WIDTH, dtype), WIDTH)
    inputs = (*(_tensor(*shape, dtype=dtype) for _ in range(2)), *(_tensor(WIDTH, dtype=dtype) for _ in range(2)))

    def plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x + residual, (WIDTH,), weight, bias, EPSILON)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = npu_dropout_add_layer_norm(x, residual, weight, bias, 0.0, EPSILON)
        return out

    peers = {"torch.compile": torch.compile(plain), "eager": plain}
    return _compare(_what("npu_dropout_add_layer_norm f+b, no dropout", mib, dtype), ours, peers, inputs, {}, 8)


def _ring(mib: int, dtype: torch.dtype) -> list[Row]:
    """Forward alone: there is no backward."""
    length, depth = _rows(mib, WIDTH, dtype), WIDTH // HEADS
    sides = []
    for _ in range(2):
        statistics = (torch.randn(1, HEADS, length, 1).repeat(1, 1, 1, 8), torch.rand(1, HEADS, length, 1).repeat(1, 1, 1, 8))
        sides += [_tensor(length, 1, WIDTH, dtype=dtype, grad=False), *statistics]

    def plain(out1: Tensor, max1: Tensor, sum1: Tensor, out2: Tensor, max2: Tensor, sum2: Tensor) -> tuple[Tensor, ...]:
        maximum = torch.maximum(max1, max2)
        share1, share2 = sum1 * torch.exp(max1 - maximum), sum2 * torch.exp(max2 - maximum)
        total = share1 + share2
        weights = [(share / total)[..., :1].permute(2, 0, 1, 3).expand(-1, -1, -1, depth) for share in (share1, share2)]
        merged = [out * weight.reshape(out.shape) for out, weight in zip((out1, out2), weights, strict=True)]
        return (merged[0] + merged[1]).to(out1.dtype), maximum, total

    compiled = torch.compile(plain)
    _same(npu_ring_attention_update(*sides)[0], plain(*sides)[0])
    peers = {"torch.compile": lambda: compiled(*sides), "eager": lambda: plain(*sides)}
    result = race(lambda: npu_ring_attention_update(*sides), peers)
    moved = 3 * sides[0].nbytes + 6 * sides[1].nbytes
    return rows_of(_what("npu_ring_attention_update", mib, dtype), result, {"eager": 3.0}, _speed(result, moved))


def large() -> list[Row]:
    """Forward of each operator at 64 MiB bf16 where all buffers are reused: bytes per second as a share of a copy's."""
    dtype, made = torch.bfloat16, []
    x, gamma = _tensor(_rows(LARGE, WIDTH, dtype), WIDTH, dtype=dtype, grad=False), _tensor(WIDTH, dtype=dtype, grad=False)
    target, rotary = torch.empty_like(x), x.view(-1, 1, HEADS, WIDTH // HEADS)
    table = _tensor(len(x), 1, 1, WIDTH // HEADS, dtype=dtype, grad=False)
    # bytes moved, as multiples of x; that of the norm with a residual is x itself, read once
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "rms_norm": (2, lambda: rms_norm(x, gamma)),
        "rms_norm_residual": (3, lambda: rms_norm_residual(x, x, gamma)),
        "swiglu": (1.5, lambda: swiglu(x)),
        "npu_rotary_position_embedding": (2, lambda: npu_rotary_position_embedding(rotary, table, table)),
    }
    for name, (moved, call) in calls.items():
        result = race(call, {"copy_": lambda: target.copy_(x)})
        share = result.ratios["copy_"] * moved / 2
        why = "from the cache a core makes a million results in 0.24 ms" if name == "swiglu" and share < 0.85 else ""
        note = "; ".join(t for t in (f"{result.seconds['ours'] * 1e3:.2f} ms", why, result.remark()) if t)
        what = f"{name}, {LARGE} MiB bfloat16, reused buffers: share of copy_ bandwidth"
        made.append(Row(what, 0.85, share, "x", COMMAND, note, least=True))
    return made


def dispatch() -> Row:
    """Microseconds that a call of an operator costs beyond a kernel: a row of one number, without gradient."""
    x, gamma = torch.ones(1, 1), torch.ones(1)
    empty = torch.ops.aten.empty_like.default
    result = race(
        lambda: torch.ops.mindspeed.rms_norm.default(x, gamma, EPSILON), {"two empty_like": lambda: (empty(x), empty(x))}
    )
    spent = (result.seconds["ours"] - result.seconds["two empty_like"]) * 1e6
    note = f"whole call {result.seconds['ours'] * 1e6:.2f} µs, allocations of its results taken off"
    return Row("dispatch of torch.ops.mindspeed.rms_norm over its allocations", 1.5, spent, "µs", COMMAND, note)


def _in_process(which: str) -> list[Row]:
    """The rows of a function of this module, from a process with an allocator that keeps buffers."""
    program = (
        "import dataclasses, json, torch\n"
        "from benchmarks.operators import streaming\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"print(json.dumps([dataclasses.asdict(row) for row in streaming.{which}()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **KEPT}, capture_output=True, text=True, check=True
    )
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
