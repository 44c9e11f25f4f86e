"""The layer against DeepSpeed's own: ``python -m tests.deepspeed_layer``, its sources on the path (``make test-deepspeed``).

One process, EP 1. Both layers have the same weights, choose two experts per token without sampling, and drop by the same
capacity. Compared are answers and gradients, and the CPU time of a forward and backward pass of both in turn.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._moe_layer import Shape, build, plan_of
from mindspeed.workbench.verification.pool import WorkerPool

SHAPE: Final = Shape(tokens=1024, hidden=512, width=512, experts=16)
CHECKED: Final = Shape(tokens=96, hidden=32, width=48, experts=8)
"""A smaller layer, of which every number is compared."""
FACTOR, MINIMUM = 1.0, 4
PASSES: Final = 8
MOST: Final = 1.0


class Expert(torch.nn.Module):
    """A gated expert with the weights [H, 2 F] and [F, H] of grouped ones."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(w.detach().t().contiguous()) for w in (first, second))

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.first).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.second)


def layers(shape: Shape) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Any, Any]:
    """Both layers as functions of tokens [T, H], and as modules."""
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    ours = build(shape, torch.float32)
    gate = TopKGate(
        shape.hidden, shape.experts, shape.topk, FACTOR, FACTOR, MINIMUM, use_rts=False, top2_2nd_expert_sampling=False
    )
    first = ours.experts.weight1.view(shape.experts, shape.hidden, -1)
    second = ours.experts.weight2.view(shape.experts, -1, shape.hidden)
    experts = Experts(Expert(first[0], second[0]), shape.experts)
    theirs = MOELayer(gate, experts, "alone", 1, shape.experts)
    with torch.no_grad():
        gate.wg.weight.copy_(ours.router.weight)
        for expert, *weights in zip(experts.deepspeed_experts, first, second, strict=True):
            expert.first.copy_(weights[0].t())
            expert.second.copy_(weights[1].t())
    return lambda x: ours(x.unsqueeze(1))[0].squeeze(1), lambda x: theirs(x, None), ours, theirs


@dataclass
class Compared:
    """The largest difference of answers and gradients relative to the largest number, and seconds of a pass of both."""

    difference: float
    ours: float
    theirs: float


def compare(checked: Shape, timed: Shape) -> Compared:
    """Compare the numbers of a small layer and the CPU time of a large one."""
    torch.set_num_threads(1)
    ours, theirs, module, other = layers(checked)
    drawn = [torch.randn(checked.tokens, checked.hidden, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    results = []
    for run in (ours, theirs):
        x = drawn[0].clone().requires_grad_()
        y = run(x)
        y.backward(drawn[1])
        results.append([y.detach(), x.grad])
    results[0] += [module.router.weight.grad, module.experts.weight1.grad, module.experts.weight2.grad]
    of_experts = [[p.grad.t() for p in expert.parameters()] for expert in other.experts.deepspeed_experts]
    results[1] += [other.gate.wg.weight.grad, *(torch.stack(grads) for grads in zip(*of_experts, strict=True))]
    pairs = zip(*results, strict=True)
    difference = max(float((a.flatten() - b.flatten()).abs().max() / b.abs().max()) for a, b in pairs)
    return Compared(difference, *seconds(timed))


def seconds(shape: Shape) -> tuple[float, float]:
    """The least CPU time of a forward and backward pass, ours and theirs in turn."""
    ours, theirs, *_ = layers(shape)
    x = torch.randn(shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
    took: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for _ in range(PASSES):
        for run, times in zip((ours, theirs), took, strict=True):
            start = time.process_time()
            run(x).sum().backward()
            times.append(time.process_time() - start)
    gc.enable()
    return min(took[0][1:]), min(took[1][1:])


def compare_here(checked: Shape, timed: Shape) -> Compared:
    """Run `compare` of the module that worker processes import."""
    from tests import deepspeed_layer

    return deepspeed_layer.compare(checked, timed)


def main() -> int:
    """Print the comparison; 1 if the numbers differ or the pass takes longer than DeepSpeed's."""
    gate = {"capacity_factor": FACTOR, "min_capacity": MINIMUM}
    names = ("deepspeed-moe-rearrange", "moe-grouped-gemm")
    model = {"num_experts": SHAPE.experts, "gated_linear_unit": True, "activation": "silu"}
    plan = plan_of(*names, settings={"deepspeed-moe": gate}, ep=1, **model)
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        (result,) = pool.call(compare_here, 1, CHECKED, SHAPE, plan=plan)
    share = result.ours / result.theirs
    print(f"answers and gradients, largest relative difference: {result.difference:.1e}")
    print(
        f"layer of {SHAPE.tokens:,} tokens, {SHAPE.experts} experts of {SHAPE.hidden} x {SHAPE.width}: CPU time "
        f"{1e3 * result.ours:.1f} ms / DeepSpeed's {1e3 * result.theirs:.1f} ms = {share:.2f} ({MOST:.2f} at most)"
    )
    return int(result.difference > 1e-5 or share > MOST)


if __name__ == "__main__":
    sys.exit(main())
