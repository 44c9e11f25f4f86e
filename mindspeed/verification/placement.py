"""Where each local tensor lies in the full model, read from the metadata that Megatron keeps for its checkpoints."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from mindspeed.verification.record import Piece


@dataclass(frozen=True, slots=True)
class Placed:
    """A local parameter with its place: a ShardedTensor, or a factory where it consists of several (SwiGLU's two halves)."""

    parameter: torch.nn.Parameter
    sharded: Any

    @property
    def main_grad(self) -> torch.Tensor:
        """The accumulated gradient that Megatron's data parallelism keeps beside the parameter."""
        gradient: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return gradient

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], tuple[slice, ...], torch.Tensor]]:
        """(name, full shape, index, view) of each part of ``tensor``, which is shaped like the parameter."""
        if isinstance(self.sharded, ShardedTensorFactory):
            built = self.sharded.build_fn(self.sharded.key, tensor, self.sharded.replica_id, self.sharded.flattened_range)
            parts = built.values() if isinstance(built, dict) else built
            yield from ((*_place(part), part.data) for part in parts)
        else:
            yield (*_place(self.sharded), tensor)


def placed_parameters(chunks: Sequence[torch.nn.Module]) -> list[Placed]:
    """Every parameter of this rank's model chunks with its place. Raises ValueError when one has none."""
    found: dict[int, Placed] = {}
    for chunk in unwrap_model(list(chunks)):
        state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for sharded in state.values():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and isinstance(sharded.data, torch.nn.Parameter):
                found.setdefault(id(sharded.data), Placed(sharded.data, sharded))
        missing = [name for name, parameter in chunk.named_parameters() if id(parameter) not in found]
        if missing:
            raise ValueError(f"parameters without a place in the full model: {', '.join(missing)}")
    return list(found.values())


def fill_weights(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Give every parameter its share of a full tensor that depends on its name and ``seed`` alone, not on the layout."""
    with torch.no_grad():
        for placed in placed_parameters(chunks):
            values = torch.empty(placed.parameter.shape, dtype=torch.float32)
            for name, shape, index, view in placed.views(values):
                view.copy_(_full_weight(name, shape, seed)[index])
            placed.parameter.copy_(values)


def pieces_of(kind: str, placed: Placed, tensor: torch.Tensor) -> Iterator[Piece]:
    """The pieces of ``tensor``, a gradient or the weight of ``placed``."""
    for name, shape, index, view in placed.views(tensor.detach()):
        yield Piece(kind, name, shape, index, view.to("cpu", torch.float32, copy=True).numpy())


def _full_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big")))
    if len(shape) > 1:
        return noise / math.sqrt(shape[-1])
    return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)


def _place(sharded: Any) -> tuple[str, tuple[int, ...], tuple[slice, ...]]:
    """Axes that were put before the tensor's own number the expert; they move into the name."""
    axes = sharded.prepend_axis_num
    name, shape = str(sharded.key), tuple(sharded.global_shape[axes:])
    for number in sharded.global_offset[:axes]:
        before, experts, after = name.rpartition(".experts.")
        name = f"{before}{experts}{number}.{after}" if experts else f"{name}[{number}]"
    return name, shape, tuple(sharded.global_slice()[axes:])
