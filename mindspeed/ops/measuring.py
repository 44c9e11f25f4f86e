"""Measure C++ operators on this processor in turns with what a job runs without them: ``python -m mindspeed.ops.measuring``.

One thread, processor time, the least of several turns. A rank never measures: ``mindspeed ops build`` does, once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import mindspeed.ops as operators
from mindspeed.ops.native_library import DTYPES, choose_library, load
from mindspeed.ops.speeds import MEASURED, PRODUCTS, Speed, cases

TURNS: Final = 7
ROWS, HIDDEN, EXPERTS, TOPK = 1024, 1024, 8, 2
SMALL: Final = 256
"""Rows and columns of small matrices: as large as those of 2^24 multiplications get."""

Work = Callable[[], object]


class Case(NamedTuple):
    """A call of an operator, and the calls of ``peer`` that a job makes without it."""

    ours: Work
    peer: str
    without: Work


def measure(op: str, dtype: str, small: bool = False) -> Speed:
    """Time one operator; products can be left to torch, too. One that seems to lose is timed once more."""
    torch.manual_seed(0)
    is_product = op in PRODUCTS
    case = PRODUCT_CASES[op](DTYPES[dtype], small) if is_product else CASES[op](DTYPES[dtype])
    runs = {"kernel": case.ours, "without": case.without}
    if is_product:
        runs["library"] = case.ours
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(2):
        for _ in range(TURNS):
            for name, run in runs.items():
                if is_product:
                    choose_library(op, dtype, small, name == "library")
                start = time.thread_time()
                run()
                best[name] = min(best[name], time.thread_time() - start)
        speed = Speed(op, dtype, best["kernel"], best.get("library"), best["without"], case.peer, small)
        if not speed.loses:
            break
    return speed


def main() -> None:
    """Print the times of every operator in the library as JSON."""
    torch.set_num_threads(1)
    if (built := load()) is None:
        sys.exit("the library is not loaded")
    names = [op for op in MEASURED if op in built.operators]
    print(json.dumps([asdict(measure(op, *case)) for op in names for case in cases(op)]))


def _trained(run: Callable[..., Any], *inputs: Tensor) -> Work:
    """Forward and backward."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    given = torch.randn_like(run(*leaves))
    return lambda: torch.autograd.grad(run(*leaves), wanted, given)


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def _groups(small: bool) -> tuple[Tensor, list[tuple[int, int]], int, int]:
    """Cumulative ends of equal groups, where each group begins and ends, and the columns on both sides of its product."""
    groups, width = (8 * EXPERTS, SMALL) if small else (EXPERTS, HIDDEN)
    ends = list(range(0, ROWS + 1, ROWS // groups))
    return torch.tensor(ends[1:]), list(pairwise(ends)), width, width // 2


def _matmul_add(dtype: torch.dtype, small: bool) -> Case:
    rows, width = (SMALL, SMALL) if small else (ROWS, HIDDEN)
    x, dy, grad = _random(dtype, rows, width), _random(dtype, rows, width), torch.zeros(width, width)

    def without() -> None:
        grad.add_(dy.t() @ x)

    return Case(lambda: operators.npu_matmul_add_fp32(x, dy, grad), "mm and add", without)


def _grouped_matmul_add(dtype: torch.dtype, small: bool) -> Case:
    ends, parts, width, columns = _groups(small)
    x, dy = _random(dtype, ROWS, width), _random(dtype, ROWS, columns)
    grad = torch.zeros(len(parts), width, columns)

    def without() -> None:
        for into, (start, end) in zip(grad, parts, strict=True):
            into.add_(x[start:end].t() @ dy[start:end])

    return Case(lambda: operators.npu_groupmatmul_add_fp32(x, dy, ends, grad), "mm and add of each expert", without)


def _grouped_matmul(dtype: torch.dtype, small: bool) -> Case:
    ends, parts, width, columns = _groups(small)
    x, weight = _random(dtype, ROWS, width), _random(dtype, len(parts), width, columns)

    def ours(x: Tensor, weight: Tensor) -> Any:
        return operators.npu_gmm(x, weight, group_list=ends)

    def without(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([x[start:end] @ one for (start, end), one in zip(parts, weight, strict=True)])

    return Case(_trained(ours, x, weight), "mm of each expert", _trained(without, x, weight))


def _rms_norm(dtype: torch.dtype) -> Case:
    x, gamma = _random(dtype, ROWS, HIDDEN), torch.ones(HIDDEN, dtype=dtype)

    def ours(x: Tensor, gamma: Tensor) -> Any:
        return operators.rms_norm(x, gamma, 1e-6)

    def without(x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), gamma, 1e-6)

    return Case(_trained(ours, x, gamma), "torch's rms_norm", _trained(without, x, gamma))


def _swiglu(dtype: torch.dtype) -> Case:
    x = _random(dtype, ROWS, 2 * HIDDEN)

    def without(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    return Case(_trained(lambda x: operators.swiglu(x), x), "silu and a product", _trained(without, x))


def _rotary(dtype: torch.dtype) -> Case:
    x = _random(dtype, ROWS, 1, 16, HIDDEN // 16)
    cos, sin = _random(dtype, ROWS, 1, 1, HIDDEN // 16), _random(dtype, ROWS, 1, 1, HIDDEN // 16)

    def without(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    ours = _trained(lambda x: operators.npu_rotary_position_embedding(x, cos, sin), x)
    return Case(ours, "products with cos and sin", _trained(without, x))


def _routing() -> tuple[Tensor, Tensor]:
    """Experts of each token, and the tokens in the order of their experts."""
    experts = torch.rand(ROWS, EXPERTS).topk(TOPK).indices
    return experts, torch.argsort(experts.flatten(), stable=True) // TOPK


def _permute(dtype: torch.dtype) -> Case:
    x, (experts, source) = _random(dtype, ROWS, HIDDEN), _routing()

    def ours(x: Tensor) -> Any:
        return operators.npu_fused_moe_token_permute(x, experts)[0]

    return Case(_trained(ours, x), "index_select", _trained(lambda x: x.index_select(0, source), x))


def _unpermute(dtype: torch.dtype) -> Case:
    x, (experts, source) = _random(dtype, ROWS, HIDDEN), _routing()
    permuted, slots = operators.npu_fused_moe_token_permute(x, experts)
    probs = torch.rand(ROWS, TOPK).to(dtype)
    by_row = torch.empty(ROWS * TOPK, dtype=dtype)
    by_row[slots.long()] = probs.flatten()

    def ours(permuted: Tensor, probs: Tensor) -> Any:
        return operators.npu_fused_moe_token_unpermute(permuted, slots, probs)

    def without(permuted: Tensor, by_row: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, source, permuted * by_row[:, None])

    return Case(_trained(ours, permuted, probs), "index_add", _trained(without, permuted, by_row))


def _logits(dtype: torch.dtype) -> Case:
    logits, labels = _random(dtype, ROWS // 4, 16 * HIDDEN), torch.randint(16 * HIDDEN, (ROWS // 4,))
    factors = torch.zeros(4, ROWS // 4)

    def ours() -> None:
        made = logits.clone()
        largest, sums = operators.logit_statistics(made, labels)
        operators.logit_gradient(made, largest, sums[0].log(), factors, labels)

    def without() -> None:
        wide = logits.float()
        largest = wide.amax(-1, keepdim=True)
        sums = wide.sub_(largest).exp_().sum(-1, keepdim=True)
        wide.mul_(factors[0, :, None] / sums).scatter_add_(1, labels[:, None], factors[1, :, None]).to(dtype)

    return Case(ours, "softmax in place, in fp32", without)


PRODUCT_CASES: Final[dict[str, Callable[[torch.dtype, bool], Case]]] = {
    "npu_gmm": _grouped_matmul,
    "npu_groupmatmul_add_fp32": _grouped_matmul_add,
    "npu_matmul_add_fp32": _matmul_add,
}
"""Functions that make the case of each of `mindspeed.ops.speeds.PRODUCTS`, with small or large matrices."""
CASES: Final[dict[str, Callable[[torch.dtype], Case]]] = {
    "logit_statistics": _logits,
    "npu_fused_moe_token_permute": _permute,
    "npu_fused_moe_token_unpermute": _unpermute,
    "npu_rotary_position_embedding": _rotary,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
}
"""Functions that make the case of each other one of `mindspeed.ops.speeds.MEASURED`."""


if __name__ == "__main__":
    main()
