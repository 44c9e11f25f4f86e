"""``MINDSPEED_TRACE=1``: one line on standard error for each step of discovery, resolution, activation and each hook."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

TRACE_VARIABLE: Final = "MINDSPEED_TRACE"


def tracing() -> bool:
    """Return whether the environment switches on the trace."""
    return os.environ.get(TRACE_VARIABLE, "").lower() in ("1", "true", "yes")


def trace(step: str, text: str) -> None:
    """Print ``mindspeed[RANK] STEP TEXT`` when the trace is on, without the rank in a process that has none."""
    if tracing():
        rank = os.environ.get("RANK")
        print(f"mindspeed{f'[{rank}]' if rank else ''} {step:<9} {text}", file=sys.stderr, flush=True)


def trace_error(error: BaseException) -> None:
    """Print the traceback of an error when the trace is on."""
    if tracing():
        traceback.print_exception(error, file=sys.stderr)
