"""The predicted memory of pipeline stages as bars."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.memory.byte_count import MIB
from mindspeed.memory_planner.plans import shares
from mindspeed.memory_planner.stages import Stage
from mindspeed.workbench.html_page import bar, heading, legend


def memory_bars(stages: Sequence[Stage]) -> str:
    """Return a bar for each stage with its shares, as long as its peak is to the largest one."""
    most = max(stage.peak for stage in stages)
    parts = [[(name, size / MIB) for name, size in shares(stage).items() if name != "peak"] for stage in stages]
    names = [name for name, _ in parts[0]]
    bars = (
        heading(f"stage {stage.stage}: {stage.peak / MIB:,.1f} MiB") + bar(found, most / MIB)
        for stage, found in zip(stages, parts, strict=True)
    )
    return legend(names) + "".join(bars)
