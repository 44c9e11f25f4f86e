"""Random numbers of a step: ranks that hold other tokens drop other elements of them.

Megatron gives the ranks of a context-parallel group one random state, from which all of them make the same weights and
which checkpoints keep once. So a rank leaves it for the length of a step only: it draws one number, which is the same on all
ranks of the group, and goes on from that number and its place in the group. Ranks of a tensor-parallel group have one place, so
that what Megatron lets them share or not stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

_SPREAD = 0x9E3779B97F4A7C15


@contextmanager
def rank_rng(place: int) -> Iterator[None]:
    """All random states of the device leave the common ones, which are one number further afterwards."""
    tracker = get_cuda_rng_tracker()
    common = {}
    for name in tracker.get_states():
        with tracker.fork(name):
            common[name] = _leave(place)
    own = _leave(place)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(own)
        for name, state in common.items():
            with tracker.fork(name):
                torch.cuda.set_rng_state(state)


def _leave(place: int) -> torch.Tensor:
    """Go on from a number and a place; gives the common state."""
    number = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cuda"))
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(number ^ place * _SPREAD % (1 << 62))
    return state
