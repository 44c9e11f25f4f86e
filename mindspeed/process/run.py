"""The run of this process: its folder, its ranks in words, and the exit status with which it is to be started again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

REPORT_VARIABLE: Final = "MINDSPEED_REPORT"
"""Environment variable that names the file to which rank 0 writes the report."""
PLAN: Final = "plan.json"
"""The plan of a run, in its folder."""
UNFINISHED: Final = 75
"""Exit status of a job that its launcher is to start again: EX_TEMPFAIL of sysexits.h."""
SHOWN: Final = 12
"""Differences and missing ranks that a message lists at most."""
_folders: list[Path] = []


def set_run_folder(folder: Path) -> None:
    """Set the folder of the run, which outlives this node: logs and tracebacks are written there from here on."""
    _folders[:] = [folder]


def run_folder() -> Path | None:
    """Return the folder of the run, or else of its report; None where neither is known."""
    return next(iter(_folders), _folder_of_report())


def unlogged_folder() -> Path | None:
    """Return the folder of the report of a trainer that writes no log by itself; None for other trainers, or without one."""
    return None if _folders else _folder_of_report()


def _folder_of_report() -> Path | None:
    path = os.environ.get(REPORT_VARIABLE)
    return Path(path).parent if path else None


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 4-7``; of very many the first ones."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(names[:SHOWN])}{more}"
