"""Time and bytes of the chunked loss beside its peers: ``python -m benchmarks.loss``.

Output layer and cross-entropy, forward and backward, one thread: the least processor time of several turns, and the peak of
bytes beyond the operands, their gradients and the fp32 sum of the weight's gradient. Peers: the logits of all tokens with
PyTorch's and with Megatron's fused cross-entropy, PyTorch's ``LinearCrossEntropyLoss`` and, where it is installed, the compiled
form of cut-cross-entropy. The kernels of Liger and of cut-cross-entropy need a GPU: `benchmarks.gpu`, row G14.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table import Row, main
from mindspeed.features.chunked_loss.linear_cross_entropy import linear_cross_entropy
from mindspeed.memory.meter import Meter

COMMAND: Final = "python -m benchmarks.loss"
TOKENS, HIDDEN, VOCABULARY, CHUNKS, TURNS = 1024, 512, 8192, 8, 5
TARGETS: Final = {"accumulate": 1.05, "recompute": 1.4}
"""Times the time of the fastest peer: recomputation makes four products where others make three."""
COMPILED: Final = "cut-cross-entropy, compiled"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers() -> dict[str, Loss]:
    """Return the losses of others, as functions of hidden states [T, H], weight [V, H] and labels [T]."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), labels)

    def megatrons(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = fused_vocab_parallel_cross_entropy((hidden @ weight.t())[:, None], labels[:, None], dist.group.WORLD)
        return loss.mean()

    module = nn.LinearCrossEntropyLoss(HIDDEN, VOCABULARY)

    def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(module, {"linear.weight": weight}, (hidden, labels))
        return made

    found: dict[str, Loss] = {"PyTorch, all logits": whole, "Megatron's fused": megatrons, "LinearCrossEntropyLoss": torchs}
    if find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy as cut

        found[COMPILED] = partial(cut, impl="torch_compile")
    return found


def rows() -> list[Row]:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [row for dtype in (torch.float32, torch.bfloat16) for row in _rows(dtype)]


def _rows(dtype: torch.dtype) -> list[Row]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,))

    def trained(loss: Loss) -> None:
        torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))

    def ours(mode: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, mode=mode, chunks=CHUNKS).mean()

    others = peers()
    expected = torch.autograd.grad(others["PyTorch, all logits"](hidden, weight, labels), (hidden, weight))
    gradients = sum(part.nbytes for part in expected)
    runs: dict[str, Loss] = {mode: partial(ours, mode) for mode in TARGETS}
    for run in runs.values():
        found = torch.autograd.grad(run(hidden, weight, labels), (hidden, weight))
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
    everyone = {name: partial(trained, loss) for name, loss in (runs | others).items()}
    seconds = dict.fromkeys(everyone, float("inf"))
    for _ in range(TURNS):
        for name, run in everyone.items():
            begin = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - begin)
    sums = 0 if dtype is torch.float32 else 4 * weight.numel()
    counted = {name: run for name, run in everyone.items() if name != COMPILED}  # in which a mode that counts is not allowed
    peaks = {name: max(0, _peak(run) - gradients - (sums if name in runs else 0)) for name, run in counted.items()}
    best = min(others, key=seconds.__getitem__)
    what = f"{str(dtype).removeprefix('torch.')}, {TOKENS:,} tokens, vocabulary {VOCABULARY:,}, {CHUNKS} chunks"
    bytes_of = {name: f" and {peak / 2**20:.1f} MiB" for name, peak in peaks.items()}
    each = ", ".join(f"{name} {seconds[name] * 1e3:.0f} ms{bytes_of.get(name, '')}" for name in everyone)
    made = []
    for mode, target in TARGETS.items():
        ratio, share = seconds[mode] / seconds[best], peaks[mode] / peaks["PyTorch, all logits"]
        made.append(Row(f"chunked loss, {mode}, {what}: time / {best}", target, ratio, "x", COMMAND, each))
        made.append(Row(f"chunked loss, {mode}, {what}: bytes / all logits", 1 / CHUNKS, share, "x", COMMAND))
    return made


def _peak(run: Callable[[], object]) -> int:
    with Meter() as meter:
        run()
    return meter.peak.host


if __name__ == "__main__":
    main(rows)
