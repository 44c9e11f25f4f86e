"""From an operator and its inputs to work: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.accelerator.measuring import Work, tensors_of

FORWARD: Final = 0.92
"""Share of the copy's bandwidth that a streaming operator has to reach."""
BOTH: Final = 0.85

Function = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """``function(*inputs)`` and the same in plain torch; ``forward`` and ``backward`` are bytes that have to move.

    A peer is a function of the inputs, or such a function with inputs of its own.
    """

    function: Function
    formula: Function
    inputs: tuple[Any, ...]
    forward: float
    backward: float = 0.0
    peers: Mapping[str, Function | tuple[Function, tuple[Any, ...]]] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row: its number in the table of rows, what it is, and how to prepare it at full size or small."""

    row: str
    what: str
    prepare: Callable[[bool], Work]


def device() -> torch.device:
    """Where the tensors of a case are made."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=device(), dtype=dtype).requires_grad_(grad)


def size_of(*tensors: Tensor) -> float:
    """Bytes of all elements."""
    return float(sum(t.numel() * t.element_size() for t in tensors))


def cases(row: str, what: str, make: Callable[[bool], Operation], backward: bool = True) -> list[Case]:
    """The case of the forward pass and, unless there is none, that of both passes."""
    made = [Case(row, f"{what}, forward", lambda small: _forward(make(small)))]
    if backward:
        made.append(Case(row, f"{what}, forward + backward", lambda small: _both(make(small))))
    return made


def _candidates(operation: Operation) -> dict[str, tuple[Function, tuple[Any, ...]]]:
    known = {name: peer if isinstance(peer, tuple) else (peer, operation.inputs) for name, peer in operation.peers.items()}
    if device().type == "cuda":
        known["torch.compile"] = (torch.compile(operation.formula, dynamic=False), operation.inputs)
    return known


def _forward(operation: Operation) -> Work:
    def call(function: Function, inputs: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            return function(*inputs)

    peers = {name: partial(call, *peer) for name, peer in _candidates(operation).items()}
    ours, formula = (partial(call, f, operation.inputs) for f in (operation.function, operation.formula))
    dtype = operation.inputs[0].dtype
    # a target of both passes together is none of the forward pass
    return Work(ours, formula, peers, dtype, operation.forward, FORWARD)


def _both(operation: Operation) -> Work:
    with torch.no_grad():
        outputs = tensors_of(operation.function(*operation.inputs))
    given = [torch.randn_like(out) if out.is_floating_point() else None for out in outputs]

    def call(function: Function, inputs: tuple[Any, ...]) -> list[Tensor]:
        pairs = zip(tensors_of(function(*inputs)), given, strict=False)
        wanted: Sequence[Tensor] = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        used = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
        return list(torch.autograd.grad([out for out, _ in used], wanted, [grad.view_as(out) for out, grad in used]))

    peers = {name: partial(call, *peer) for name, peer in _candidates(operation).items()}
    ours, formula = (partial(call, f, operation.inputs) for f in (operation.function, operation.formula))
    moved = operation.forward + operation.backward
    return Work(ours, formula, peers, operation.inputs[0].dtype, moved, BOTH, targets=operation.targets)
