"""``mindspeed memory``: the bytes of a job on each pipeline stage, before launch and measured."""

from __future__ import annotations

from mindspeed.cli.lazy import Group

memory = Group(
    "memory",
    lazy={
        "plan": "mindspeed.cli.memory_plan:plan",
        "measure": "mindspeed.cli.memory_measure:measure",
        "pairs": "mindspeed.cli.memory_plan:pairs",
    },
    help="Estimate the memory of a job, or measure it on a small model.",
)
