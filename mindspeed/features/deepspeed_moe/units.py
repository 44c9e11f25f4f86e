"""Experts with places unit by unit: while one unit is computed, the rows of other units travel.

A unit is one local expert and a slice of its places. Its rows are dispatched to the expert's ranks, gathered at the tensor
ranks, computed, scattered and returned. The schedule is a list of steps. Backward runs it in reverse order, since autograd
takes the node that was made last, and each wait of forward posts a transfer of gradients.

L local experts, P ranks with other experts, S tensor ranks, G groups of tokens, C places, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mindspeed.features.deepspeed_moe.tables import ExpertRanks
from mindspeed.moe.overlap import ExpertCall, InFlight, send
from mindspeed.moe.transfer import TokenTransfer, all_gather, reduce_scatter

Act = Literal["post", "wait", "compute", "weights"]
Leg = Literal["dispatch", "gather", "scatter", "return", ""]


class Step(NamedTuple):
    """Step of the schedule: post a transfer of a unit, wait for one, compute a unit, or let the weights enter the graph.

    ``between`` are the steps that run between the two products of a unit. Backward computes the gradients of the weights
    at the step ``weights``.
    """

    act: Act
    leg: Leg = ""
    unit: int = 0
    between: tuple[Step, ...] = ()


def schedule(units: int, gathers: bool = False, one_group: bool = False) -> list[Step]:
    """The steps of ``units``, with gathers and scatters of tensor ranks, of which ``one_group`` at a time has transfers."""
    if not gathers:
        return _without_tensor_ranks(units)
    return _one_group_at_a_time(units) if one_group else _with_tensor_ranks(units)


def _without_tensor_ranks(units: int) -> list[Step]:
    """Everything is dispatched first; an answer leaves before the next unit is computed."""
    steps = [*_each("post", "dispatch", range(units)), Step("weights")]
    for unit in range(units):
        steps += [Step("wait", "dispatch", unit), Step("compute", unit=unit), Step("post", "return", unit)]
    return [*steps, *_each("wait", "return", range(units))]


def _with_tensor_ranks(units: int) -> list[Step]:
    """The next unit is gathered and the last one returned between the products of a unit, whatever else travels."""
    steps = [Step("post", "dispatch", 0), Step("wait", "dispatch", 0), Step("post", "gather", 0)]
    steps += [*_each("post", "dispatch", range(1, units)), Step("weights")]
    for unit in range(units):
        following, before, _ = _neighbours(unit, units)
        between = [*_each("wait", "dispatch", following), *_each("post", "gather", following)]
        between += [*_each("wait", "scatter", before), *_each("post", "return", before)]
        computed = Step("compute", unit=unit, between=tuple(between))
        steps += [Step("wait", "gather", unit), computed, Step("post", "scatter", unit)]
    steps += [*_each("wait", "return", range(units - 1)), Step("wait", "scatter", units - 1)]
    return [*steps, Step("post", "return", units - 1), Step("wait", "return", units - 1)]


def _one_group_at_a_time(units: int) -> list[Step]:
    """The tensor ranks have the link under the first product of a unit, the ranks with other experts under the second.

    Under unit 0, which has none before it, units 1 and 2 are dispatched first, and unit 1 is gathered.
    """
    steps = [Step("post", "dispatch", 0), Step("wait", "dispatch", 0)]
    steps += [Step("post", "gather", 0), Step("weights"), Step("wait", "gather", 0)]
    for unit in range(units):
        following, before, next_but_one = _neighbours(unit, units)
        tensor = [*_each("post", "gather", following), *_each("post", "scatter", before)]
        expert = [*_each("post", "dispatch", next_but_one), *_each("post", "return", before)]
        if unit == 0:
            tensor, expert = [*_each("post", "dispatch", following), *expert], tensor
        between = [*(step._replace(act="wait") for step in tensor), *expert]
        steps += [*tensor, Step("compute", unit=unit, between=tuple(between))]
        steps += [step._replace(act="wait") for step in expert]
    last = range(units - 1, units)
    steps += [*_each("post", "scatter", last), *_each("wait", "scatter", last)]
    return [*steps, *_each("post", "return", last), *_each("wait", "return", last)]


def _neighbours(unit: int, units: int) -> tuple[range, range, range]:
    """The unit behind this one, the one before it, and the next but one; empty where there is none."""
    return range(units)[unit + 1 : unit + 2], range(units)[max(unit - 1, 0) : unit], range(units)[unit + 2 : unit + 3]


def _each(act: Act, leg: Leg, units: range) -> list[Step]:
    return [Step(act, leg, unit) for unit in units]


@dataclass(frozen=True, slots=True)
class Units:
    """A table [P, L, G, C, H] in units of ``width`` places, the last slice of an expert with what is left."""

    ranks: int
    experts: int
    groups: int
    capacity: int
    width: int

    @classmethod
    def of(cls, ranks: int, experts: int, groups: int, capacity: int, parts: int) -> Units:
        """Cut the places of each expert into ``parts`` slices, or fewer where they leave no place for the last ones."""
        return cls(ranks, experts, groups, capacity, -(-capacity // parts))

    @property
    def slices(self) -> list[tuple[int, slice]]:
        """The local expert and the places of each unit."""
        starts = range(0, self.capacity, self.width)
        return [(expert, slice(start, start + self.width)) for expert in range(self.experts) for start in starts]

    def cut(self, table: Tensor) -> list[Tensor]:
        """The rows [P x G x places, H] of each unit."""
        table_PLGCH = self._viewed(table)
        return [table_PLGCH[:, expert, :, places].reshape(-1, table.shape[-1]) for expert, places in self.slices]

    def join(self, units: list[Tensor]) -> Tensor:
        """Undo `cut`."""
        rows = self.ranks * self.experts * self.groups * self.capacity
        table = units[0].new_empty((rows, units[0].shape[-1]))
        table_PLGCH = self._viewed(table)
        for (expert, places), unit in zip(self.slices, units, strict=True):
            part_PGcH = table_PLGCH[:, expert, :, places]
            part_PGcH.copy_(unit.view(part_PGcH.shape))
        return table

    def _viewed(self, table: Tensor) -> Tensor:
        return table.view(self.ranks, self.experts, self.groups, self.capacity, table.shape[-1])


@dataclass(slots=True)
class UnitCall(ExpertCall):
    """Replace the counts that experts get by units of a table that they process one after another.

    With ``one_group`` transfers of the ranks with other experts and of the tensor ranks are never in flight together.
    """

    ranks: ExpertRanks
    units: Units
    one_group: bool = False
    _steps: list[Step] = field(default_factory=list)
    _rows: dict[int, Tensor] = field(default_factory=dict)
    _in_flight: dict[tuple[Leg, int], InFlight] = field(default_factory=dict)

    def post(self, table: Tensor) -> None:
        """Post what of the table [P x L x G x C, H] can be sent at once."""
        self._rows = dict(enumerate(_Cut.apply(table, self.units)))  # type: ignore[no-untyped-call]
        self._steps = schedule(len(self._rows), self.ranks.tensor_group.size() > 1, self.one_group)
        while self._steps[0].act == "post":
            self._move(self._steps.pop(0))

    def answer(self, experts: Any) -> Tensor:
        """Compute all units and start their remaining transfers; the result replaces the outputs until `collect`."""
        last = max(number for number, step in enumerate(self._steps) if step.act != "wait")
        steps, self._steps = self._steps[: last + 1], self._steps[last + 1 :]
        products = _Products(experts)
        for step in steps:
            if step.act == "weights":
                products.enter_weights()
            elif step.act == "compute":
                self._compute(step, products)
            else:
                self._move(step)
        return next(iter(self._in_flight.values())).received if self._in_flight else self._rows[0]

    def collect(self) -> Tensor:
        """Wait for the table of outputs [P x L x G x C, H]."""
        for step in self._steps:
            self._move(step)
        rows = [self._rows.pop(unit) for unit in sorted(self._rows)]
        answers: Tensor = _Join.apply(self.units, *rows)  # type: ignore[no-untyped-call]
        return answers

    def _move(self, step: Step) -> None:
        if step.leg in ("dispatch", "return") and self.ranks.group.size() == 1:
            return
        if step.act == "post":
            rows = self._rows.pop(step.unit)
            self._in_flight[step.leg, step.unit] = send(rows, self._transfer(step.leg, len(rows)))
        else:
            self._rows[step.unit] = self._in_flight.pop((step.leg, step.unit)).wait()

    def _compute(self, step: Step, products: _Products) -> None:
        def between() -> None:
            for inner in step.between:
                self._move(inner)

        expert, _ = self.units.slices[step.unit]
        self._rows[step.unit] = products.of(self._rows.pop(step.unit), expert, between)

    def _transfer(self, leg: Leg, rows: int) -> TokenTransfer:
        if leg == "gather":
            return all_gather(self.ranks.tensor_group)
        return reduce_scatter(self.ranks.tensor_group) if leg == "scatter" else self.ranks.exchange(rows)


class _Products:
    """The products of single experts, with one tensor of ends for each number of rows."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._weights: Any = None
        self._ends: dict[int, Tensor] = {}

    def enter_weights(self) -> None:
        """Let the weights enter the graph: backward computes their gradients here, one product per expert."""
        self._weights = self._experts.weights()

    def of(self, rows: Tensor, expert: int, between: Callable[[], None]) -> Tensor:
        """The outputs of one expert, with a callback ``between`` its products, where others apply the weights of rows."""
        count = rows.shape[0]
        if count not in self._ends:
            self._ends[count] = torch.full((1,), count, dtype=torch.int64, device=rows.device)
        answers: Tensor = self._experts.products(rows, between, self._ends[count], self._weights, expert)
        return answers


@dataclass(frozen=True, slots=True)
class SingleExperts:
    """Stand in for grouped experts where each expert is a separate module, as it is with biases."""

    experts: Sequence[torch.nn.Module]

    def weights(self) -> None:
        """Do nothing: each expert has its weights in the graph where it is computed."""

    def products(self, rows: Tensor, between: Callable[[], None], ends: Tensor, weights: None, expert: int) -> Tensor:
        """Return the outputs of one expert, before which the steps ``between`` its products run."""
        between()
        answers: Tensor = self.experts[expert](rows, torch.ones(len(rows), device=rows.device))[0]
        return answers


class _Cut(torch.autograd.Function):
    """A table in units, each with rows of its own; backward joins their gradients."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, units: Units) -> tuple[Tensor, ...]:
        ctx.units = units
        return tuple(units.cut(table))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.units.join(grads), None


class _Join(torch.autograd.Function):
    """Units as a table; backward cuts its gradient."""

    @staticmethod
    def forward(ctx: Any, units: Units, *rows: Tensor) -> Tensor:
        ctx.units = units
        return units.join(list(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.units.cut(grads[0].contiguous())
