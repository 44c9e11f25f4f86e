"""Digests of weights and gradients, and whether replicas agree in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed import plugins as ms
from mindspeed.problems import Fix

BITS: Final = 48
"""Bits of a digest: a float of a log holds them exactly."""


class Digests:
    """Digests of the parameters and gradients of this rank's model chunks."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        spread = parallel_state.get_expert_model_parallel_world_size() > 1
        self.replicated = [p for p in self.parameters if getattr(p, "allreduce", True) or not spread]

    def compare(self, step: int) -> dict[str, float]:
        """Return the digests of all ranks together, and report replicas whose parameters differ (MS615); collective."""
        gradients = (getattr(p, "main_grad", p.grad) for p in self.parameters)
        own = [digest(self.parameters), digest(gradient for gradient in gradients if gradient is not None)]
        replicas = _gather([digest(self.replicated)], parallel_state.get_data_parallel_group(with_context_parallel=True))
        if len(set(replicas)) > 1:
            text = (
                f"after step {step} the {len(replicas)} data-parallel replicas, which must hold equal parameters, have "
                f"{len(set(replicas))} different versions of them"
            )
            ms.report_problem(
                ms.Problem(
                    "MS615",
                    text,
                    ("deterministic",),
                    fix=Fix.advise(
                        "find the first step after which replicas differ with --set deterministic.digest_interval=1, then "
                        "remove features one by one until the replicas are equal"
                    ),
                )
            )
        every = _gather(own, None)
        return {"parameters": float(_combine(every[::2])), "gradients": float(_combine(every[1::2]))}


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number of `BITS` bits made from every byte of the tensors, in order."""
    total = hashlib.blake2b(digest_size=BITS // 8)
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        total.update(values.numpy().tobytes())
    return int.from_bytes(total.digest(), "big")


def _combine(digests: Iterable[int]) -> int:
    total = hashlib.blake2b(digest_size=BITS // 8)
    for value in digests:
        total.update(value.to_bytes(BITS // 8, "big"))
    return int.from_bytes(total.digest(), "big")


def _gather(values: list[int], group: Any) -> list[int]:
    """Return the values of all ranks of a group, by rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=torch.cuda.current_device())
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [value for part in parts for value in part.tolist()]
