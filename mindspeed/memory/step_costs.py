"""Measure what a training step needs: memory and communication. Plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from mindspeed.memory.byte_count import MIB
from mindspeed.memory.step_memory import StepMemory, largest_of_ranks
from mindspeed.platforms import runtime

METERED: Final = 2
"""Steps whose memory the CPU measures: its meter sees every operator, which makes a step slower. The second has the states of
the optimizer."""


class StepCosts:
    """Peak memory and communicated bytes of the last step in MiB, each of the rank that has most."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.memory = StepMemory(chunks)
        self.metrics: Mapping[str, float] = {}
        self._steps = 0

    def passes(self) -> AbstractContextManager[None]:
        """Surround the forward and backward passes of a step."""
        is_metered = runtime.platform() != "cpu" or self._steps < METERED
        return self.memory.watched() if is_metered else nullcontext()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step."""
        self.memory.ended_step()
        with runtime.traffic() as moved:
            yield
        costs = [self.memory.ended_step() or 0, sum(count.bytes for count in moved.values())]
        peak, communicated = largest_of_ranks(costs, [None])
        self.metrics = {"costs.peak_mib": peak / MIB, "costs.communicated_mib": communicated / MIB}
        self._steps += 1
