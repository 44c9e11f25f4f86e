"""An optimizer step in windows: its parameters are updated a part at a time, so that the rest may be elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage

from mindspeed.memory.parked import LayerPart, Parked, Source

Use = Literal["step", "save", "load"]


@dataclass(eq=False)
class MainWeight(Source):
    """A parameter of the inner optimizer, and the 16-bit weights that the model computes with.

    ``main`` are the fp32 main weights, ``weight`` the same elements of the model; None where the model computes with ``main``
    itself. ``residual`` and ``ties`` are kept in place of ``main`` where it is joined from ``weight``, ``copy`` where it
    rests in host memory. ``owner`` is the feature that takes ``main`` away.
    """

    main: Tensor
    weight: Tensor | None
    group: int
    optimizer: Any
    residual: Tensor | None = None
    ties: Tensor | None = None
    copy: Tensor | None = None
    owner: str = ""
    _fill: Callable[[Tensor], object] | None = None
    _parked: Parked | None = None
    _home: Tensor | None = None

    @property
    def moments(self) -> dict[str, Tensor]:
        """The states of the inner optimizer that have an element for each one of the parameter."""
        shape = self.main.shape
        state = self.optimizer.state.get(self.main, {}).items()
        return {name: value for name, value in state if isinstance(value, Tensor) and value.shape == shape and shape}

    @property
    def is_parked(self) -> bool:
        return self._parked is not None

    def park(self, fill: Callable[[Tensor], object]) -> None:
        """Free the main weights until `restore`, when ``fill(main)`` writes them."""
        self._fill = fill
        self._parked = Parked([self.main.untyped_storage()], self, LayerPart(self.owner, "the main weights"))
        self._parked.park()

    def restore(self) -> None:
        """Bring parked main weights back in place."""
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.wait()

    def give(self, storages: Sequence[UntypedStorage]) -> None:
        """Fill the main weights, whose storage has its size again."""
        if self._fill is not None:
            self._fill(self.main)

    def expose(self, values: Tensor) -> None:
        """Show ``values`` to readers of ``main``, which is parked, until `conceal`."""
        self._home, self.main.data = self.main.data, values.view_as(self.main)

    def conceal(self) -> None:
        """Take back what was exposed; who keeps an alias of it keeps its memory."""
        home, self._home = self._home, None
        if home is not None:
            self.main.data = home


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerWindow:
    """Parameters whose main weights and states are needed at one time.

    ``use`` says for what. *step*: the inner optimizer updates them on the device. *save*: a checkpoint takes them and keeps
    what it gets, in the memory where they rest. *load*: as *save*, and what is in their place afterwards counts. ``following``
    is the window that is needed next.
    """

    weights: tuple[MainWeight, ...]
    use: Use = "step"
    following: OptimizerWindow | None = None


def divide(weights: Sequence[MainWeight], parts: int) -> tuple[OptimizerWindow, ...]:
    """Return windows of at most the elements of ``weights`` divided by ``parts``, plus those of the largest parameter."""
    share = sum(weight.main.numel() for weight in weights) / parts
    members: list[list[MainWeight]] = [[]]
    filled = 0
    for weight in weights:
        if filled >= share:
            members.append([])
            filled = 0
        members[-1].append(weight)
        filled += weight.main.numel()
    following: OptimizerWindow | None = None
    windows: list[OptimizerWindow] = []
    for part in reversed(members):
        following = OptimizerWindow(tuple(part), following=following)
        windows.append(following)
    return tuple(reversed(windows))


@torch.no_grad()
def step(
    optimizer: Any, windows: Sequence[OptimizerWindow], around: Callable[[OptimizerWindow], AbstractContextManager[Any]]
) -> None:
    """Step an inner optimizer window by window, and copy the main weights of each to the model before it ends.

    An optimizer that updates each element by itself gives the bits of one step. Groups are copied for each window: fused
    optimizers count their calls in them, which must be one for the whole step.
    """
    groups = optimizer.param_groups
    counted: dict[int, dict[str, Any]] = {}
    try:
        for window in windows:
            optimizer.param_groups = [dict(group, params=list(_members(window, index))) for index, group in enumerate(groups)]
            with around(window):
                optimizer.step()
                for weight in window.weights:
                    if weight.weight is not None:
                        weight.weight.copy_(weight.main.view_as(weight.weight))
            counted |= {index: group for index, group in enumerate(optimizer.param_groups) if group["params"]}
    finally:
        optimizer.param_groups = groups
    for index, group in counted.items():
        groups[index].update((name, value) for name, value in group.items() if name != "params")


def _members(window: OptimizerWindow, group: int) -> Iterator[Tensor]:
    return (weight.main for weight in window.weights if weight.group == group)
