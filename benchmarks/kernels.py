"""How near to the memory's speed are the streaming kernels? One thread, forward and backward, as a share of ``copy_``.

The bytes that an operator must read and write, over its time, against those of a copy of the same size in the same rounds:
the least times of each, since other load on the machine only adds. `python -m benchmarks.ops` compares with torch's operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.operators.timing import forward_backward
from benchmarks.table import Row, main, repetitions, sized
from mindspeed.ops import npu_fused_moe_token_permute, npu_fused_moe_token_unpermute, rms_norm, swiglu

COMMAND: Final = "python -m benchmarks.kernels"
WIDTH, HIDDEN, EXPERTS, TOPK = 4096, 512, 32, 8
ROUNDS: Final = 12
SECONDS: Final = 0.02
"""How long each is repeated in a round."""
BEYOND: Final = 64
"""MiB of a copy that no cache holds. Nor do they hold what forward and backward of 16 MiB move, 48 to 80 MiB."""
IN_CACHE: Final = 0.5
"""Target of tensors that the caches hold."""


class Work(NamedTuple):
    """A call, its bytes as multiples of the size, and its target at 16 MiB."""

    name: str
    run: Callable[[], object]
    moved: float
    target: float


def rows() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return [row for mib in sized((16, 4), (1,)) for dtype in (torch.bfloat16, torch.float32) for row in shares(mib, dtype)]


def shares(mib: int, dtype: torch.dtype) -> list[Row]:
    works = [_rms_norm(mib, dtype), _swiglu(mib, dtype), *_permutation(mib, dtype)]
    beyond = sized(BEYOND, mib)
    works += [_copy("copy", mib), _copy("copy past the caches", beyond, beyond / mib)]
    least = dict.fromkeys((work.name for work in works), float("inf"))
    for _ in range(repetitions(ROUNDS)):
        for work in works:
            least[work.name] = min(least[work.name], _least(work.run))
    rates = {work.name: work.moved * (mib << 20) / least[work.name] for work in works}
    copied, past = rates.pop("copy"), rates.pop("copy past the caches")
    copies = f"a copy of {mib} MiB {copied / 1e9:.0f}, one of {beyond} MiB, past the caches, {past / 1e9:.0f}"
    return [
        Row(
            f"{work.name} f+b, {mib} MiB {str(dtype).removeprefix('torch.')}, one thread: share of copy_",
            work.target if mib >= 16 else IN_CACHE,
            rates[work.name] / copied,
            "x",
            COMMAND,
            f"{rates[work.name] / 1e9:.0f} GB/s; {copies}",
            least=True,
        )
        for work in works
        if work.name in rates
    ]


def _copy(name: str, mib: int, sizes: float = 1) -> Work:
    source = torch.randn(mib << 18)
    target = torch.empty_like(source)
    return Work(name, lambda: target.copy_(source), 2 * sizes, 0)


def _least(run: Callable[[], object]) -> float:
    """The least seconds of one call, repeated for `SECONDS`."""
    run()
    least, end = float("inf"), time.perf_counter() + sized(SECONDS, 0.0)
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        least = min(least, now - start)
        if now >= end:
            return least


def _tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _rms_norm(mib: int, dtype: torch.dtype) -> Work:
    inputs = (_tensor((mib << 20) // (WIDTH * dtype.itemsize), WIDTH, dtype=dtype), _tensor(WIDTH, dtype=dtype))
    return Work("rms_norm", forward_backward(rms_norm, *inputs, wanted=inputs), 5, 0.8)


def _swiglu(mib: int, dtype: torch.dtype) -> Work:
    x = _tensor((mib << 20) // (2 * WIDTH * dtype.itemsize), 2 * WIDTH, dtype=dtype)
    return Work("swiglu", forward_backward(swiglu, x, wanted=(x,)), 4, 0.8)


def _permutation(mib: int, dtype: torch.dtype) -> tuple[Work, Work]:
    """Tokens to ``mib`` MiB of rows of 32 experts, and back with probabilities."""
    tokens = (mib << 20) // (HIDDEN * dtype.itemsize * TOPK)
    x = _tensor(tokens, HIDDEN, dtype=dtype)
    experts = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    permuted, slots = npu_fused_moe_token_permute(x, experts)
    inputs = (permuted.detach().requires_grad_(), _tensor(tokens, TOPK, dtype=dtype))
    there = forward_backward(lambda x: npu_fused_moe_token_permute(x, experts)[0], x, wanted=(x,))
    back = forward_backward(lambda rows, probs: npu_fused_moe_token_unpermute(rows, slots, probs), *inputs, wanted=inputs)
    return Work("permute", there, 2 + 2 / TOPK, 0.75), Work("unpermute", back, 3 + 2 / TOPK, 0.8)


if __name__ == "__main__":
    main(rows)
