"""The world a plan is made for: sizes, model shape, platform and versions. Unknown is not None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict

import mindspeed.job.pydantic_plugins  # noqa: F401  before the first model is made
from mindspeed.job.fields import FIELDS, LATENT_WIDTHS, PLATFORMS, Fields
from mindspeed.job.hybrid_pattern import HybridPattern, pattern_of

__all__ = ["FIELDS", "LATENT_WIDTHS", "PARALLEL_SIZES", "PLATFORMS", "UnknownValue", "World", "size_name", "typed_values"]

PARALLEL_SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")
"""Parallel sizes that a user can set; each defaults to 1."""


def size_name(size: str) -> str:
    """Return a parallel size of the world, or the derived ``dp``, in words."""
    return "data-parallel size" if size == "dp" else FIELDS[size].meaning


def typed_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that were read from JSON in the types of their fields."""
    return {name: FIELDS[name].typed(value) if name in FIELDS else value for name, value in values.items()}


def share_of_chunk(layers: int, chunk: int, chunks: int) -> int:
    """Return how many layers a model chunk gets where those of a rank are dealt out to its chunks in turn."""
    return max(0, -(-(layers - chunk) // chunks))


class Signal(Exception):  # noqa: N818 - no error of the code that it passes through
    """Base of exceptions by which a value of a job reports to the caller of a function of the job."""


class UnknownValue(Signal):
    """Fields were read that are not set. The resolver turns the first into a 'not checked' row."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        self.field = fields[0]
        super().__init__(f"{', '.join(fields)} is not set")


class World(Fields, BaseModel):
    """Frozen set of known values.

    Reading what nobody gave returns Megatron's default, an attribute of the class, and raises `UnknownValue` where there is
    none, so no check ever sees None. Values are taken as they are: a request has typed them.

    Derived: ``dp`` = world_size / (tp * pp * cp), ``num_micro_batches`` = global_batch_size / (micro_batch_size * dp).
    ``layer_split`` has the layers of each model chunk, in the order of the model, where a feature or the segments of a hybrid
    pattern deal them out unevenly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    layer_split: tuple[int, ...] = ()

    def __init__(self, values: Mapping[str, Any], layer_split: Sequence[int] = ()) -> None:
        known = dict.fromkeys(PARALLEL_SIZES, 1) | {name: value for name, value in values.items() if value is not None}
        if unknown := known.keys() - FIELDS.keys():
            raise KeyError(f"unknown fields of the world: {', '.join(sorted(unknown))}")
        split = tuple(layer_split) or pattern_of(known.get("hybrid_layer_pattern", "")).split
        object.__setattr__(self, "__dict__", known | {"layer_split": split})
        object.__setattr__(self, "__pydantic_fields_set__", set(known))
        object.__setattr__(self, "__pydantic_extra__", None)
        object.__setattr__(self, "__pydantic_private__", None)

    if not TYPE_CHECKING:  # a name that is no field is an error of mypy

        def __getattr__(self, name: str) -> Any:
            if name in FIELDS:
                raise UnknownValue(name)
            raise AttributeError(f"the job has no field {name!r}")

    @property
    def dp(self) -> int:
        """Data-parallel size, at least 1; floor division, the resolver reports a remainder."""
        return max(1, int(self.world_size) // int(self.tp * self.pp * self.cp))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and pipeline."""
        return int(self.global_batch_size) // int(self.micro_batch_size * self.dp)

    @property
    def is_hybrid(self) -> bool:
        """Return whether the model is Megatron's HybridModel, a list of single layers."""
        return bool(self.hybrid_layer_pattern)

    @property
    def pattern(self) -> HybridPattern:
        """The layers of a hybrid model; of another one it has none."""
        return pattern_of(self.hybrid_layer_pattern)

    @property
    def equal_share(self) -> tuple[int, int]:
        """Layers that pipeline stages share equally, and the number of these stages, without stages with an explicit number.

        The embedding and the output layer are among the layers where they count as such.
        """
        layers = (
            self.num_layers + self.embedding_is_layer + self.loss_is_layer - self.first_stage_layers - self.last_stage_layers
        )
        return layers, self.pp - (self.first_stage_layers > 0) - (self.last_stage_layers > 0)

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Layers of each model chunk, in the order of the model, as Megatron deals them out where no feature does."""
        if self.layer_split:
            return self.layer_split
        layers, stages = self.equal_share
        of_stage = [layers // max(1, stages)] * self.pp
        of_stage[0] = self.first_stage_layers or of_stage[0]
        of_stage[-1] = self.last_stage_layers or of_stage[-1]
        chunks = [layers // self.vpp for _ in range(self.vpp) for layers in of_stage]
        chunks[0] -= self.embedding_is_layer
        chunks[-1] -= self.loss_is_layer
        return tuple(chunks)

    @property
    def block_recomputed(self) -> tuple[int, ...]:
        """Layers of each model chunk, in the order of the model, that block recomputation takes; empty without it."""
        if (self.recompute_granularity, self.recompute_method) != ("full", "block"):
            return ()
        chunks = self.vpp if self.recompute_per_rank else 1
        return tuple(
            share_of_chunk(self.recompute_num_layers, number // self.pp if chunks > 1 else 0, chunks)
            for number in range(self.pp * self.vpp)
        )

    @property
    def pattern_per_chunk(self) -> tuple[str, ...]:
        """The layers of each model chunk of a hybrid model, in the order of the model, one character each."""
        sizes = self.layers_per_chunk
        return tuple(self.pattern.layers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))

    def need(self, *names: str) -> None:
        """Raise `UnknownValue` with all of these fields that are not set."""
        if unknown := [name for name in names if not self.knows(name)]:
            raise UnknownValue(*unknown)

    def knows(self, name: str) -> bool:
        """Return whether ``name`` has a value, also for the derived ones."""
        try:
            getattr(self, name)
        except UnknownValue:
            return False
        return True

    def is_set(self, name: str) -> bool:
        """Return whether ``name`` is known and neither false nor 0."""
        return bool(self.knows(name) and getattr(self, name))

    def known(self) -> dict[str, Any]:
        """The given values and the parallel sizes, in the order of `FIELDS`."""
        given = self.__dict__
        return {name: given[name] for name in FIELDS if name in given}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.known().items()))

    def __repr__(self) -> str:
        return f"World({self.known()})"

    __str__ = __repr__
