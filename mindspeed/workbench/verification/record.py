"""Record the results of one rank of a run: losses, shards of tensors at their place in the full model, and effects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed.memory.byte_count import Bytes

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Part of a full tensor: ``full[index] == values`` where ``full`` has ``shape``.

    ``kind`` is "input gradient", "gradient" or "weight"; ``name`` the tensor's name in the whole, unsharded model.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    index: Any
    values: Array


@dataclass(frozen=True, slots=True)
class RoutingChoice:
    """Experts that one rank chose in a call of a router: ``indices`` [rows, B, ...] of each ``topk``, for tokens at ``rows``.

    ``place`` is the step, the micro-batch of the global batch, and the name of the router in the whole model.
    """

    place: tuple[int, int, str]
    rows: tuple[int, ...]
    indices: tuple[NDArray[np.int16], ...]


@dataclass(slots=True)
class RankResult:
    """The results of one rank's run.

    ``losses`` maps (step, micro-batch of the global batch) to the loss; only ranks of the last stage have any.
    ``settings`` are the Megatron configurations as the model got them, ``sizes`` the sizes of the groups that exist.
    ``reached`` counts, by feature, how often its patches and operators were reached in the first step, and how often its
    hooks changed or answered something.
    Where the rules of a backend are checked, ``host_reads`` counts the reads of device values in the first step by operation
    and line, and ``communicators`` are those that the rank has created.
    ``choices`` are those of routers, where another run is to repeat them.
    ``traffic`` is the number of bytes sent by each kind of collective, ``activations`` the device and
    host bytes that the first micro-batch keeps for its backward pass, ``optimizer`` those of main weights and states between
    steps.
    """

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    pieces: list[TensorShard] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    reached: dict[str, dict[str, int]] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    activations: Bytes = field(default_factory=Bytes)
    optimizer: Bytes = field(default_factory=Bytes)
    choices: list[RoutingChoice] = field(default_factory=list)
    host_reads: dict[str, int] = field(default_factory=dict)
    communicators: list[str] = field(default_factory=list)
