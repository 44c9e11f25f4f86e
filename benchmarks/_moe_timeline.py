"""Print what processor and link of one of two ranks do during a layer with experts: ``python -m benchmarks._moe_timeline``.

The time is that of `benchmarks._virtual_time`: the second product of balanced experts takes 1, and so do their transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks._moe_layer import Shape, build, plan_of
from benchmarks._virtual_time import Event, virtual_time
from mindspeed.workbench.verification.pool import WorkerPool

SHAPE = Shape(shared=96)
NAMES = {
    "aten.mm": "dense product",
    "mindspeed.npu_gmm": "product of experts",
    "mindspeed.npu_gmm_sum": "weight gradient of experts",
}


def record() -> list[list[Event]]:
    """The events of a forward and of a backward pass."""
    layer, shape = build(SHAPE, torch.float32), SHAPE
    x = torch.randn(shape.tokens, 1, shape.hidden).requires_grad_()
    rows = shape.tokens * shape.topk
    unit, size = rows * shape.hidden * shape.width, 4 * rows * shape.hidden / 2
    with virtual_time(unit, size) as forward:
        y = layer(x)[0]
    with virtual_time(unit, size) as backward:
        y.sum().backward()
    return [forward.events, backward.events]


def lines(events: Sequence[Event]) -> Iterator[str]:
    """A row of a table for everything that takes the processor's time, with the transfers that begin meanwhile."""
    transfers = [event for event in events if event.kind.startswith("transfer")]
    for event in [event for event in events if not event.kind.startswith("transfer")]:
        begun = [f"{t.kind.split()[1]} until {t.end:.2f}" for t in transfers if event.start <= t.start < event.end]
        yield f"| {event.start:.2f} - {event.end:.2f} | {NAMES.get(event.kind, event.kind)} | {', '.join(begun)} |"


def main() -> None:
    with WorkerPool(search_path=[str(Path(__file__).resolve().parents[1])]) as pool:
        for feature in ("moe-alltoall-overlap", "moe-allgather-overlap"):
            passes = pool.call(record, 2, plan=plan_of(feature))[0]
            for name, events in zip(("forward", "backward"), passes, strict=True):
                print(f"{feature}\n\n| {name} | processor | link |\n|---|---|---|", *lines(events), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
