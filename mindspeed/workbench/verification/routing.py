"""Record the experts that routers choose, and have another run choose the same.

In bf16 two scores are often equal, or nearly so. A run that rounds otherwise sends such a token elsewhere, and its gradients
differ by more than any rounding. Probabilities are computed from the run's own scores all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mindspeed.workbench.verification.record import RoutingChoice

Place = tuple[int, int, str]
"""A call of a router: see `RoutingChoice`."""
Indices = NDArray[np.int16]
Choices = Mapping[Place, tuple[Indices, ...]]
"""The indices of all tokens of each call, [S, B, ...]."""


def merge(choices: Iterable[RoutingChoice], length: int) -> Choices:
    """Join the choices of all ranks for sequences of ``length`` tokens."""
    whole: dict[Place, tuple[Indices, ...]] = {}
    for choice in choices:
        empty = tuple(np.zeros((length, *indices.shape[1:]), indices.dtype) for indices in choice.indices)
        parts = whole.setdefault(choice.place, empty)
        for full, indices in zip(parts, choice.indices, strict=True):
            full[list(choice.rows)] = indices
    return whole


@dataclass(slots=True)
class RoutingRecord:
    """Watch the routers of a model: they repeat the choices ``replayed``, and make the others, which are kept in ``made``.

    Watched are Megatron's routers, and modules that choose by themselves: these have ``choose_experts``, which gives the
    experts [S, B, K] of scores [S, B, E]. ``where`` gives step, micro-batch and the rows of the sequence that this rank has. A
    call with fewer tokens than these has those behind the calls before it.
    """

    replayed: Choices
    where: Callable[[int], tuple[int, int, Sequence[int]]]
    made: list[RoutingChoice] = field(default_factory=list)
    _seen: dict[tuple[str, bytes], tuple[Place, tuple[int, ...]]] = field(default_factory=dict)
    _taken: Counter[Place] = field(default_factory=Counter)

    def watch(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Stand between every router and its choice."""
        for path, module in [pair for chunk in chunks for pair in chunk.named_modules()]:
            block = "prediction" if "mtp" in path else "decoder"
            if path.endswith(".router") and hasattr(module, "routing"):
                module.routing = partial(self._route, f"{block} {module.layer_number}", module.routing)
            elif hasattr(module, "choose_experts"):
                module.choose_experts = partial(self._choose, f"{block} {module.layer_number}", module.choose_experts)

    def _choose(self, router: str, original: Callable[[Tensor], Tensor], scores_SBE: Tensor) -> Tensor:
        place, rows = self._located(router, scores_SBE)
        chosen_SBK = original(scores_SBE)
        if place in self.replayed:
            return torch.from_numpy(self.replayed[place][0][list(rows)]).to(chosen_SBK)
        self.made.append(RoutingChoice(place, rows, (chosen_SBK.cpu().numpy().astype(np.int16),)))
        return chosen_SBK

    def _route(self, router: str, original: Callable[..., Any], logits_SBE: Tensor, *rest: Any, **more: Any) -> Any:
        place, rows = self._located(router, logits_SBE)
        known = [part[list(rows)] for part in self.replayed.get(place, ())]
        with _Choosing(logits_SBE.shape[:2], known) as choosing:
            result = original(logits_SBE, *rest, **more)
        if not known:
            self.made.append(RoutingChoice(place, rows, tuple(choosing.made)))
        return result

    def _located(self, router: str, logits_SBE: Tensor) -> tuple[Place, tuple[int, ...]]:
        """Find the call; recomputation in backward is known by the bits of its logits, its micro-batch is no longer at hand."""
        bits = (router, logits_SBE.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        if bits not in self._seen:
            step, number, rows = self.where(logits_SBE.shape[0])
            if any(place[0] != step for place, _ in self._seen.values()):
                self._seen.clear()
                self._taken.clear()
            place, tokens = (step, number, router), logits_SBE.shape[0]
            if tokens < len(rows):
                first = self._taken[place]
                self._taken[place] += tokens
                rows = rows[first : first + tokens]
            self._seen[bits] = place, tuple(rows)
        return self._seen[bits]


class _Choosing(TorchFunctionMode):
    """Give ``topk`` over the experts of tokens the indices that are replayed, as long as there are any, and keep them."""

    def __init__(self, tokens_SB: Sequence[int], replayed: Sequence[Indices]) -> None:
        super().__init__()
        self._tokens = tuple(tokens_SB)
        self._replayed = list(replayed)
        self.made: list[Indices] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, indices = args[0], result.indices
        if scores.shape[0] != self._tokens[0] * self._tokens[1] or indices.shape[:-1] != scores.shape[:-1]:
            return result  # the choice of tokens for an expert, where it has too many
        if self._replayed:
            again = torch.from_numpy(self._replayed.pop(0)).to(indices).reshape(indices.shape)
            result = torch.return_types.topk((scores.gather(-1, again), again))
        self.made.append(result.indices.detach().view(*self._tokens, *indices.shape[1:]).cpu().numpy().astype(np.int16))
        return result
