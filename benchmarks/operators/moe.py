"""Speed of the mixture-of-experts and matmul operators: bf16, 32 experts of 512 x 768, against every peer in torch.

Values are compared with the reference before anything is timed. Where peers differ in what they do, the note says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.timing import COMMAND, Race, race
from benchmarks.operators.timing import rows as compared
from benchmarks.table import Row
from mindspeed.ops import (
    lcal_coc,
    npu_fused_moe_token_permute,
    npu_fused_moe_token_unpermute,
    npu_gmm_v2,
    npu_groupmatmul_add_fp32,
    npu_matmul_add_fp32,
    quant_gmm,
)

EXPERTS: Final = 32
ROWS: Final = 4096
HIDDEN: Final = 512
FFN: Final = 768
TOPK: Final = 8
EQUAL: Final = 0.97
"""The lowest ratio of two equal speeds."""

Work = Callable[[], object]


def rows_of_experts() -> dict[str, list[int]]:
    """Rows of each expert: all alike, as Zipf's law has it, and every fourth expert having all."""
    shares = [1 / (e + 1) for e in range(EXPERTS)]
    zipf = [int(ROWS * share / sum(shares)) for share in shares]
    zipf[0] += ROWS - sum(zipf)
    every_fourth = [0 if e % 4 else 4 * ROWS // EXPERTS for e in range(EXPERTS)]
    return {"balanced": [ROWS // EXPERTS] * EXPERTS, "Zipf": zipf, "3 of 4 experts empty": every_fourth}


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def same(ours: Tensor, peer: Tensor, tolerance: float = 1e-2) -> None:
    """Stop the benchmark where ours and a peer differ by more than rounding."""
    scale = float(peer.abs().max())
    torch.testing.assert_close(ours.float(), peer.float(), rtol=tolerance, atol=tolerance * scale)


def gradients(run: Callable[..., Tensor], *inputs: Tensor) -> Work:
    """Forward and backward of ``run`` from a random contiguous gradient."""
    inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
    given = torch.randn_like(run(*inputs))
    return lambda: torch.autograd.grad(run(*inputs), inputs, given)


def parts(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The rows of each expert."""
    ends = [0, *accumulate(sizes)]
    return [x[start:end] for start, end in pairwise(ends)]


def padded(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows of each expert, filled up with zeros to the most crowded one."""
    out = x.new_zeros(len(sizes), max(sizes), x.shape[1])
    for e, part in enumerate(parts(x, sizes)):
        out[e, : part.shape[0]] = part
    return out


def no_slower(what: str, result: Race, peer: str, most: float, note: str = "") -> Row:
    """A row that says how much longer than ``peer`` ours takes."""
    return Row(f"{what}: ours / {peer}", most, 1 / result.ratios[peer], "x", COMMAND, note)


def _work(result: Race, operations: float) -> str:
    """The rates of the processor, and what is read."""
    ours, dense = (operations / result.seconds[name] / 1e9 for name in ("ours", "dense mm"))
    return f"{ours:.0f} GFLOP/s, the dense product {dense:.0f}; ours reads 24 MiB of weights, the dense product 0.75"


def grouped(name: str, sizes: list[int]) -> list[Row]:
    """Forward, and forward with both gradients."""
    x, w, dense = bf16(ROWS, HIDDEN), bf16(EXPERTS, HIDDEN, FFN) / 16, bf16(HIDDEN, FFN)
    groups, ends = torch.tensor(sizes), torch.tensor(sizes).cumsum(0).int()

    def ours(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = npu_gmm_v2(x, w, group_list=groups)
        return y

    def loop(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([part @ one for part, one in zip(parts(x, sizes), w, strict=True)])

    def grouped_mm(x: Tensor, w: Tensor) -> Tensor:
        return F.grouped_mm(x, w, offs=ends)

    def dense_mm(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    blocks = padded(x, sizes)
    same(ours(x, w), loop(x, w))
    same(ours(x, w), grouped_mm(x, w))
    forward = race(
        lambda: ours(x, w),
        {
            "F.grouped_mm": lambda: grouped_mm(x, w),
            "dense mm": lambda: x @ dense,
            "padded bmm": lambda: torch.bmm(blocks, w),
            "loop of mm": lambda: loop(x, w),
        },
    )
    both = race(
        gradients(ours, x, w),
        {
            "F.grouped_mm": gradients(grouped_mm, x, w),
            "dense mm": gradients(dense_mm, x, dense),
            "padded bmm": gradients(torch.bmm, blocks, w),
            "loop of mm": gradients(loop, x, w),
        },
        turns=9,
    )
    made = []
    for passes, what, result in ((1, "forward", forward), (3, "forward + backward", both)):
        what = f"grouped matmul, {name}, {what}"
        note = _work(result, passes * 2 * ROWS * HIDDEN * FFN)
        made += compared(what, result, dict.fromkeys(("F.grouped_mm", "loop of mm", "padded bmm"), EQUAL), note)
        made = [row for row in made if "best peer (dense mm)" not in row.what]
        made.append(no_slower(what, result, "dense mm", 1.1, note))
    return made


def accumulating() -> list[Row]:
    """Weight gradients added into fp32, in one product and for every expert."""
    made = []
    x, dy, grad = bf16(ROWS, HIDDEN * 2), bf16(ROWS, HIDDEN * 2), torch.zeros(HIDDEN * 2, HIDDEN * 2)
    other = torch.zeros_like(grad)
    npu_matmul_add_fp32(x, dy, grad)
    same(grad, dy.float().t() @ x.float(), 1e-4)
    result = race(
        lambda: npu_matmul_add_fp32(x, dy, grad),
        {
            "mm, then add": lambda: other.add_(dy.t() @ x),
            "fp32 addmm_": lambda: other.addmm_(dy.float().t(), x.float()),
            "mm alone": lambda: dy.t() @ x,
        },
    )
    note = "columns are packed anew for every 256 rows of the result; the peer rounds the product to bf16"
    made += compared(
        "matmul_add_fp32, 4096 x 1024 x 1024", result, dict.fromkeys(("mm, then add", "fp32 addmm_"), EQUAL), note
    )[:2]
    made.append(no_slower("matmul_add_fp32, 4096 x 1024 x 1024", result, "mm alone", 1.1))
    for name, sizes in rows_of_experts().items():
        made += grouped_accumulating(name, sizes)
    return made + composed()


def composed() -> list[Row]:
    """Products of the operators that combine products of the device, against those of torch."""
    x, w = bf16(ROWS // 4, HIDDEN * 2), bf16(HIDDEN * 2, FFN * 2)
    same(lcal_coc.pure_matmul(x, w), x @ w)
    result = race(
        lambda: lcal_coc.pure_matmul(x, w), {"mm": lambda: x @ w, "mm in fp32": lambda: (x.float() @ w.float()).bfloat16()}
    )
    note = "ours sums in fp32 for the collective behind it, and rounds"
    return compared("lcal_coc.pure_matmul, 1024 x 1024 x 1536", result, {"mm": EQUAL, "mm in fp32": EQUAL}, note)


def grouped_accumulating(name: str, sizes: list[int]) -> list[Row]:
    x, dy, grad = bf16(ROWS, HIDDEN), bf16(ROWS, FFN), torch.zeros(EXPERTS, HIDDEN, FFN)
    other, ends = torch.zeros_like(grad), torch.tensor(sizes).cumsum(0)

    def mm_then_add() -> None:
        for into, a, b in zip(other, parts(x, sizes), parts(dy, sizes), strict=True):
            into.add_(a.t() @ b)

    def addmm() -> None:
        for into, a, b in zip(other, parts(x, sizes), parts(dy, sizes), strict=True):
            into.addmm_(a.float().t(), b.float())

    npu_groupmatmul_add_fp32(x, dy, ends, grad)
    addmm()
    same(grad, other, 1e-4)
    result = race(lambda: npu_groupmatmul_add_fp32(x, dy, ends, grad), {"mm, then add": mm_then_add, "fp32 addmm_": addmm})
    return compared(f"groupmatmul_add_fp32, {name}", result, dict.fromkeys(("mm, then add", "fp32 addmm_"), EQUAL))


def permutation(mib: int) -> list[Row]:
    """Tokens of ``mib`` MiB to 8 experts of 32 each, and back."""
    tokens = mib * 2**20 // (2 * HIDDEN)
    x = bf16(tokens, HIDDEN)
    experts = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    source = torch.argsort(experts.flatten(), stable=True) // TOPK
    permuted, slots = npu_fused_moe_token_permute(x, experts)
    probs = torch.rand(tokens, TOPK).bfloat16()
    by_row = torch.empty(tokens * TOPK, dtype=torch.bfloat16)
    by_row[slots.long()] = probs.flatten()
    assert torch.equal(permuted, x.index_select(0, source))

    def add_weighed() -> Tensor:
        return torch.zeros_like(x).index_add_(0, source, permuted * by_row[:, None])

    def formula(rows: Tensor, slots: Tensor, probs: Tensor) -> Tensor:
        return (rows[slots].view(tokens, TOPK, HIDDEN) * probs[..., None]).sum(1)

    def bag(rows: Tensor, slots: Tensor, probs: Tensor | None) -> Tensor:
        return F.embedding_bag(slots.view(tokens, TOPK), rows, mode="sum", per_sample_weights=probs)

    compiled, where = torch.compile(formula), slots.long()
    same(npu_fused_moe_token_unpermute(permuted, slots, probs), formula(permuted.float(), where, probs.float()))
    sizes = f"{mib} MiB of tokens, top {TOPK}"
    made = compared(
        f"permute, {sizes}",
        race(
            lambda: npu_fused_moe_token_permute(x, experts),
            {
                "index_select, the order given": lambda: x.index_select(0, source),
                "sort and index_select": lambda: x.index_select(0, torch.argsort(experts.flatten(), stable=True) // TOPK),
            },
        ),
        {"index_select, the order given": 1.0, "sort and index_select": 1.0},
    )
    reads = (
        "each row is read once and in no order, which index_add_ of bf16 does too; what it pays on top is the weighed copy of "
        "the rows"
    )
    back = race(
        lambda: npu_fused_moe_token_unpermute(permuted, slots, probs),
        {
            "index_add_, weighed": add_weighed,
            "torch.compile of the formula": lambda: compiled(permuted, where, probs),
            "F.embedding_bag": lambda: bag(permuted, where, probs),
        },
    )
    targets = {"index_add_, weighed": 10.0, "torch.compile of the formula": 1.0, "F.embedding_bag": 1.0}
    made += compared(f"unpermute, {sizes}", back, targets, reads)
    bare = race(
        lambda: torch.ops.mindspeed.npu_fused_moe_token_unpermute(permuted, slots, None, tokens, TOPK, False),
        {
            "index_add_": lambda: torch.zeros_like(x).index_add_(0, source, permuted),
            "F.embedding_bag": lambda: bag(permuted, where, None),
        },
    )
    made += compared(
        f"unpermute without probabilities, {sizes}",
        bare,
        {"index_add_": 10.0, "F.embedding_bag": 1.0},
        reads,
    )
    both = race(
        gradients(lambda rows, probs: npu_fused_moe_token_unpermute(rows, slots, probs), permuted, probs),
        {
            "the formula": gradients(lambda rows, probs: formula(rows, where, probs), permuted, probs),
            "torch.compile of the formula": gradients(lambda rows, probs: compiled(rows, where, probs), permuted, probs),
            "F.embedding_bag": gradients(lambda rows, probs: bag(rows, where, probs), permuted, probs),
        },
        turns=9,
    )
    targets = {"the formula": 1.0, "torch.compile of the formula": 1.0, "F.embedding_bag": 1.0}
    return made + compared(f"unpermute, {sizes}, forward + backward", both, targets)


def quantized() -> list[Row]:
    """int8 against the bf16 product of the same shape."""
    x, w = torch.randint(-128, 128, (ROWS, HIDDEN)).char(), torch.randint(-128, 128, (EXPERTS, HIDDEN, FFN)).char()
    scale, groups = torch.rand(EXPERTS, FFN) / 1024, torch.full((EXPERTS,), ROWS // EXPERTS)
    wide, wide_w = x.bfloat16(), w.bfloat16()
    exact = torch.cat([a.double() @ b.double() * s for a, b, s in zip(parts(x, groups.tolist()), w, scale, strict=True)])
    same(quant_gmm(x, w, scale, group_list=groups.cumsum(0)), exact)
    ends = groups.cumsum(0)
    result = race(
        lambda: quant_gmm(x, w, scale, group_list=ends),
        {"bf16 F.grouped_mm": lambda: F.grouped_mm(wide, wide_w, offs=ends.int())},
    )
    return compared("quant_gmm, balanced", result, {"bf16 F.grouped_mm": 1.0})


def rows() -> list[Row]:
    made = [row for name, sizes in rows_of_experts().items() for row in grouped(name, sizes)]
    made += accumulating()
    for mib in (4, 16):
        made += permutation(mib)
    return made + quantized()
