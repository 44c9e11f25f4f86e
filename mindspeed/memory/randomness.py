"""The states of random number generators, saved before a forward pass and restored while it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from mindspeed.platforms import runtime


@dataclass(frozen=True, slots=True)
class RandomState:
    """Read and write the state of a random number generator, or of several at once."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


HOST: Final = RandomState(torch.get_rng_state, torch.set_rng_state)


def generators() -> tuple[RandomState, ...]:
    """The generator of the host and, where there is one, that of the device."""
    device = runtime.device_module()
    has_generator = hasattr(device, "get_rng_state")  # torch.cpu has none of its own
    return (HOST, RandomState(device.get_rng_state, device.set_rng_state)) if has_generator else (HOST,)


@contextmanager
def replayed(generators: Sequence[RandomState], states: Sequence[Any]) -> Iterator[None]:
    """Draw the random numbers that follow ``states``, and go on afterwards as if none had been drawn."""
    before = [generator.get() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.set(state)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set(state)
