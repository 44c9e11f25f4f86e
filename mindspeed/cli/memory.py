"""``mindspeed memory``: the bytes of a job on each pipeline stage, before launch and measured; and a size as an option."""

from __future__ import annotations

import re
from typing import Any, Final

import click

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

_UNITS: Final = {"": 2**20, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class MemorySize(click.ParamType):  # type: ignore[type-arg]
    """Bytes of a size such as ``80GiB``, ``512MB`` or ``1000B``; a number without a unit is in MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?|(B)|)", str(value), re.IGNORECASE)
        size = int(float(match[1]) * _UNITS[(match[2] or match[3] or "").upper()]) if match else 0
        if size <= 0:
            self.fail(f"{value!r} is not a size such as 60GiB, or a number of MiB greater than 0", param, ctx)
        return size
