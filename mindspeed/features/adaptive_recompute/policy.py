"""The measurements of a run's first steps, and the choice that follows from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mindspeed import plugins as ms
from mindspeed.features.adaptive_recompute.least import MIB, NAME, SWAPPED
from mindspeed.memory.activations import has_own_activation, recompute_activations
from mindspeed.memory.attention import SwappedLayer, swap_attention
from mindspeed.memory.choice import Option, choose
from mindspeed.memory.model_layers import chosen_layers
from mindspeed.memory.parked import LayerPart
from mindspeed.memory.region_checkpoint import RegionCheckpoint, norms_of, recompute_norms
from mindspeed.memory.step_memory import StepMemory, largest_of_ranks
from mindspeed.memory.swap import LayerSwap
from mindspeed.problems import advice

if TYPE_CHECKING:
    from mindspeed.features.adaptive_recompute.feature import AdaptiveRecomputeArgs

SAME_LAYERS: Final = ("tp", "dp_cp")
"""Groups of the ranks that have the same layers and must choose alike."""


class RecomputedPart(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: norms and grouped experts keep the graph of the first forward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class RecomputeChoice:
    """A part of a layer of one model chunk, and the way in which it leaves."""

    chunk: int
    away: str
    part: LayerPart


class Policy:
    """Choose for each module of each layer of this rank: first all are dropped and measured, then the choice with the least
    time that fits."""

    def __init__(self, chunks: Sequence[Any], args: AdaptiveRecomputeArgs, get_group: Callable[[str], Any] | None) -> None:
        self.memory = StepMemory(chunks)
        self._args = args
        self._budget = int((args.budget_mb or 0) * MIB)
        self._groups = [get_group(name) for name in SAME_LAYERS] if get_group is not None else []
        self._swap = LayerSwap() if args.swap else None
        self._swapped: list[SwappedLayer] = []
        self._choices = list(self._parts_of(chunks))
        self._live: Counter[int] = Counter()
        self._most_live: Counter[int] = Counter()
        self._steps = 0
        self._least = 0
        self._margin = 0
        self._values: list[int] = []
        self._predicted = 0
        self._peak = 0

    def _parts_of(self, chunks: Sequence[Any]) -> Iterator[RecomputeChoice]:
        for number, chunk in enumerate(chunks):
            for layer in chosen_layers([chunk], None):
                for region in (*recompute_norms(layer, NAME), *recompute_activations(layer, NAME)):
                    yield RecomputeChoice(number, "recompute", region.part)
            if self._swap is not None:
                swapped = swap_attention(self._swap, chunk, SWAPPED, NAME)
                self._swapped += swapped
                yield from (RecomputeChoice(number, "swap", layer.part) for layer in swapped if layer.part.active)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround the passes of a step."""
        peak = self.memory.ended_step()
        profiling = self._args.profiling_steps
        if peak is not None and profiling <= self._steps <= 2 * profiling:
            self._ended_step(peak)
        if self._steps == profiling - 1:
            for choice in self._choices:
                choice.part.returns = []
        if self._swap is not None:
            self._swap.begin_step()
        self._live.clear()
        with self.memory.watched():
            yield
        self._steps += 1

    @contextmanager
    def forward(self, unit: Any) -> Iterator[None]:
        """Surround the forward pass of a micro-batch in a chunk."""
        if self._swap is not None:
            self._swap.begin(unit)
        self._live[unit.chunk] += 1
        if self._live.total() > self._most_live.total():
            self._most_live = self._live.copy()
        yield
        if self._swap is not None:
            self._swap.end()

    @contextmanager
    def backward(self, unit: Any) -> Iterator[None]:
        """Surround the backward pass of a micro-batch in a chunk."""
        if self._swap is not None:
            self._swap.enter_backward()
        yield
        self._live[unit.chunk] -= 1

    def metrics(self) -> Mapping[str, float]:
        """The kept parts, and MiB of the predicted and of the measured peak."""
        kept = sum(not choice.part.active for choice in self._choices)
        return {"kept_parts": kept, "predicted_mb": self._predicted / MIB, "peak_mb": self._peak / MIB}

    def close(self) -> None:
        """Remove the hooks."""
        for layer in self._swapped:
            for handle in layer.handles:
                handle.remove()

    def _ended_step(self, peak: int) -> None:
        """Choose after the last measured step; choose less where a step has passed the budget."""
        if self._steps == self._args.profiling_steps:
            *self._values, self._least = self._agree([*self._measured(), peak])
            self._margin = self._budget - self._least
            self._choose()
            return
        (self._peak,) = self._agree([peak])
        if self._peak > self._budget:
            self._margin -= self._peak - self._budget
            self._choose()

    def _measured(self) -> list[int]:
        """For each part its bytes at the peak, then for each part the nanoseconds of its returns in a step."""
        self.memory.synchronize()
        parts = ((choice.part, self._most_live[choice.chunk]) for choice in self._choices)
        sizes = [max(0, part.bytes - part.beside) * live for part, live in parts]
        times: list[int] = []
        for choice in self._choices:
            returns, choice.part.returns = choice.part.returns or [], None
            times.append(int(sum(before.elapsed_time(after) for before, after in returns) * 1e6))
        return [*sizes, *times]

    def _agree(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks that have the same layers."""
        return largest_of_ranks(values, self._groups)

    def _choose(self) -> None:
        count = len(self._choices)
        sizes, times = self._values[:count], self._values[count:]
        groups = [
            (Option("keep", size, 0.0), Option(choice.away, 0, time / 1e9))
            for choice, size, time in zip(self._choices, sizes, times, strict=True)
        ]
        chosen = choose(groups, self._margin)
        if chosen is None:
            least = math.ceil((self._budget - self._margin) / MIB * 100) / 100
            text = (
                f"budget_mb={self._args.budget_mb:g} is less than {least:g} MiB, which a step needs even if "
                f"{NAME} recomputes or offloads everything that it can"
            )
            fix = (
                f"--set {NAME}.budget_mb={least:g}, or use more tensor or pipeline parallelism, or replace {NAME} by "
                "recomputation of whole layers: --features recompute --set recompute.granularity=full --set "
                "recompute.method=uniform --set recompute.num_layers=1"
            )
            raise ms.MindSpeedError([ms.Problem("MS304", f"{NAME}: {text}", (NAME,), fix=advice(fix))])
        for choice, index in zip(self._choices, chosen, strict=True):
            choice.part.active = index != 0
        self._predicted = self._least + sum(group[index].bytes for group, index in zip(groups, chosen, strict=True))


def fused_parts(feature: ms.Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence where no layer has a norm or an activation apart."""
    layers = chosen_layers(chunks, None)
    if layers and not any(norms_of(layer) or has_own_activation(layer) for layer in layers):
        yield "every norm and every activation is fused into another function"
