"""Random numbers of one rank, where all ranks have one random state. The state is read on the host: no device is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


@contextmanager
def numbers_of_rank(rank: int, device: torch.device) -> Iterator[None]:
    """Draw from a random state that is made of the common one and ``rank``; the common one is a number further afterwards."""
    generator = _generator(device)
    common = generator.get_state()
    with unset_fake_temporarily():
        made_of = common.numpy().tobytes() + rank.to_bytes(8, "little")
    generator.manual_seed(int.from_bytes(blake2b(made_of, digest_size=7).digest(), "little"))
    try:
        yield
    finally:
        generator.set_state(common)
        torch.randint(2, (), device=device, generator=generator)


def _generator(device: torch.device) -> torch.Generator:
    """The generator that operators on ``device`` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: tuple[torch.Generator, ...] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]
