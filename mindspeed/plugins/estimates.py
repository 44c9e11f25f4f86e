"""Estimates of features for the search of a layout: what they add to work and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one rank: a collective over ``group`` (tp, pp, cp, dp, ep) moves ``bytes`` at each of its ``calls``.

    Calls are those of a layer for one micro-batch, ``forward`` the share of them that recomputation repeats. ``hidden`` traffic
    runs beside computation.
    """

    group: str
    collective: str
    bytes: Any
    calls: Any = 1
    forward: float = 0.5
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Additions of a feature to the time of the rank with the highest load; negative where it saves.

    ``flops`` are operations of one layer and micro-batch beside those of the model, ``repeated`` the share of a layer's forward
    pass that runs again, with its launches and messages, ``bucket_size`` the parameters of a bucket where it is not Megatron's.
    With ``gathers_weights`` the second half of the all-reduce of gradients is a gather of updated weights;
    ``overlap_gradients`` and ``overlap_weights`` put the halves beside backward and forward passes. Numbers may be arrays.
    """

    flops: Any = 0
    repeated: Any = 0
    traffic: tuple[Traffic, ...] = ()
    bucket_size: int | None = None
    gathers_weights: bool = False
    overlap_gradients: bool = False
    overlap_weights: bool = False
