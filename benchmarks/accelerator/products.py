"""Rows G5, G7, G9 and G14: operators whose ceiling is a dense product, or another attention or loss kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.accelerator.measuring import Call, Work
from benchmarks.accelerator.operation import Case, device, randn
from mindspeed.features.chunked_loss.linear_cross_entropy import linear_cross_entropy
from mindspeed.ops import fusion_attention, npu_matmul_add_fp32


def sizes_of(experts: int, rows: int, zipf: bool) -> list[int]:
    """Rows of each expert: equal, or the n-th having 1/n of what the first has."""
    shares = [1 / (n + 1) if zipf else 1.0 for n in range(experts)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    sizes[0] += rows - sum(sizes)
    return sizes


def _grouped(product: str, experts: int, zipf: bool, small: bool) -> Work:
    rows, depth, columns = (40, 24, 16) if small else (65536, 4096, 2048)
    experts = min(experts, 4) if small else experts
    sizes = sizes_of(experts, rows, zipf)
    x, dy = randn(rows, depth, grad=False), randn(rows, columns, grad=False)
    weight = randn(experts, depth, columns, grad=False)
    ends = torch.tensor(sizes, device=device()).cumsum(0)
    offsets, turned = ends.int(), weight.transpose(1, 2)
    ops = torch.ops.mindspeed

    def loop(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([part @ matrix for part, matrix in zip(a.split(sizes), b, strict=True)])

    def sums(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([left.t() @ right for left, right in zip(a.split(sizes), b.split(sizes), strict=True)])

    wide_x, wide_dy, wide_weight = (lambda: x.float()), (lambda: dy.float()), (lambda: weight.float())
    ours: dict[str, Call] = {
        "forward": lambda: ops.npu_gmm(x, weight, None, ends, True),
        "dX": lambda: ops.npu_gmm(dy, turned, None, ends, True),
        "dW": lambda: ops.npu_gmm_sum(x, dy, ends, True),
    }
    formula: dict[str, Call] = {
        "forward": lambda: loop(wide_x(), wide_weight()).bfloat16(),
        "dX": lambda: loop(wide_dy(), wide_weight().transpose(1, 2)).bfloat16(),
        "dW": lambda: sums(wide_x(), wide_dy()).bfloat16(),
    }
    peers: dict[str, dict[str, Call]] = {
        "forward": {
            "torch._grouped_mm": lambda: torch._grouped_mm(x, weight, offs=offsets),
            "a loop": lambda: loop(x, weight),
            "one dense product": lambda: x @ weight[0],
        },
        "dX": {
            "torch._grouped_mm": lambda: torch._grouped_mm(dy, turned, offs=offsets),
            "a loop": lambda: loop(dy, turned),
            "one dense product": lambda: dy @ turned[0],
        },
        "dW": {
            "torch._grouped_mm": lambda: torch._grouped_mm(x.t(), dy, offs=offsets),
            "a loop": lambda: sums(x, dy),
            "one dense product": lambda: x.t() @ dy,
        },
    }
    targets = {"one dense product": 0.85 if zipf else 0.92, "torch._grouped_mm": 1.05}
    flops = 2.0 * rows * depth * columns
    return Work(ours[product], formula[product], peers[product], torch.bfloat16, flops=flops, targets=targets)


def _weight_gradient(rows: int, outputs: int, inputs: int, small: bool) -> Work:
    rows, outputs, inputs = (40, 24, 16) if small else (rows, outputs, inputs)
    x, dy = randn(rows, inputs, grad=False), randn(rows, outputs, grad=False)
    grad = randn(outputs, inputs, dtype=torch.float32, grad=False)
    start = grad.clone()

    def ours() -> Tensor:
        npu_matmul_add_fp32(x, dy, grad)
        return grad

    def checked() -> Tensor:
        grad.copy_(start)
        return ours()

    peers: dict[str, Call] = {
        "a plain bf16 product": lambda: dy.t() @ x,
        "bf16 product, then add": lambda: start.add_(dy.t() @ x),
        "addmm into fp32": lambda: torch.addmm(start, dy.t(), x, out_dtype=torch.float32),
    }
    targets = {"a plain bf16 product": 1 / 1.03}
    # fp32 sums of exact products: what differs is their order, and that tensor cores truncate as they add
    formula: Call = lambda: start + dy.float().t() @ x.float()  # noqa: E731
    flops = 2.0 * rows * outputs * inputs
    return Work(_First(checked, ours), formula, peers, torch.float32, flops=flops, targets=targets, tolerance=1e-4)


class _First:
    """A call that is another one the first time: the check starts from a known buffer, the timing does not copy it."""

    def __init__(self, first: Call, then: Call) -> None:
        self._calls = [then, first]

    def __call__(self) -> Tensor:
        call = self._calls.pop() if len(self._calls) > 1 else self._calls[0]
        result: Tensor = call()
        return result


def _attention(length: int, small: bool) -> Work:
    length, heads, groups, width = (24, 4, 2, 16) if small else (length, 32, 4, 128)
    q, k, v = (randn(1, length, n, width) for n in (heads, groups, groups))
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=device()).triu(1)
    dout, scale = torch.randn_like(q), width**-0.5

    def gradients(function: Call) -> list[Tensor]:
        out: Tensor = function()
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.view_as(out))]

    def ours() -> Tensor:
        result: Tensor = fusion_attention(q, k, v, heads, "BSND", atten_mask=mask, scale=scale, sparse_mode=2)[0]
        return result

    def torch_own(*backends: SDPBackend) -> Tensor:
        with sdpa_kernel(list(backends)):
            views = [t.transpose(1, 2) for t in (q, k, v)]
            out = F.scaled_dot_product_attention(*views, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def in_fp32() -> Tensor:
        all_heads = (q, *(t.repeat_interleave(heads // groups, 2) for t in (k, v)))
        wide = [t.float().transpose(1, 2) for t in all_heads]
        logits = wide[0] @ wide[1].transpose(-1, -2) * scale
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ wide[2]).transpose(1, 2).to(q.dtype)

    other = in_fp32 if length <= 4096 else partial(torch_own, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    flash, cudnn = partial(torch_own, SDPBackend.FLASH_ATTENTION), partial(torch_own, SDPBackend.CUDNN_ATTENTION)
    peers: dict[str, Call] = {"SDPA flash": partial(gradients, flash), "SDPA cuDNN": partial(gradients, cudnn)}
    flops = 3.5 * 2 * length**2 * heads * width
    formula = partial(gradients, other)
    return Work(partial(gradients, ours), formula, peers, torch.bfloat16, flops=flops, targets={"SDPA flash": 0.97})


def _loss(small: bool) -> Work:
    tokens, width, vocabulary = (12, 16, 40) if small else (8192, 4096, 128256)
    hidden, weight = randn(tokens, width), (randn(vocabulary, width, grad=False) / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device())

    def trained(loss: Callable[[], Tensor]) -> list[Tensor]:
        made = loss()
        return [made.detach().float(), *torch.autograd.grad(made, (hidden, weight))]

    peers: dict[str, Call] = {}
    if find_spec("liger_kernel") is not None and not small:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        peers["Liger"] = partial(trained, lambda: liger(hidden, weight, labels))
    if find_spec("cut_cross_entropy") is not None and not small:
        from cut_cross_entropy import linear_cross_entropy as cut

        peers["cut-cross-entropy"] = partial(trained, lambda: cut(hidden, weight, labels))
    whole: Call = lambda: F.cross_entropy((hidden @ weight.t()).float(), labels)  # noqa: E731
    peers["all logits"] = partial(trained, whole)
    ours = partial(trained, lambda: linear_cross_entropy(hidden, weight, labels, mode="accumulate").mean())
    return Work(ours, partial(trained, whole), peers, torch.bfloat16, flops=6.0 * tokens * width * vocabulary, tolerance=2e-2)


CASES: list[Case] = [
    *(
        Case("G5", f"attention, causal, 32 and 4 heads of 128, {length} tokens, both ways", partial(_attention, length))
        for length in (4096, 16384, 65536)
    ),
    *(
        Case("G7", f"grouped {product}, {experts} experts, {name}", partial(_grouped, product, experts, name == "Zipf"))
        for experts in (8, 64, 256)
        for name in ("balanced", "Zipf")
        for product in ("forward", "dX", "dW")
    ),
    Case("G9", "dW added to fp32, 8192 x 8192 x 8192", partial(_weight_gradient, 8192, 8192, 8192)),
    Case("G9", "dW added to fp32, 8192 x 28672 x 8192", partial(_weight_gradient, 8192, 28672, 8192)),
    Case("G14", "linear cross-entropy, 8192 tokens, vocabulary 128256, both ways", _loss),
]
