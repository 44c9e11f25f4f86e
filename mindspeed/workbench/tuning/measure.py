"""Measuring: which configurations tell most, and short runs of them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from mindspeed.problems.fixes import Fix
from mindspeed.problems.problem import Problem, RunError
from mindspeed.workbench.tuning.search import Configuration
from mindspeed.workbench.tuning.store import Measurement, Store
from mindspeed.workbench.tuning.time import PULL, Machine, exposed, relative_work

WARM_UP: Final = 3
"""Steps at the start of a run that do not count."""
JobOf = Callable[[Configuration], Mapping[str, Any]]
Say = Callable[[str], None]


def telling(rows: Sequence[Configuration], count: int, machine: Machine) -> list[Configuration]:
    """Choose configurations from whose times those of all others follow best: each the one that leaves least variance.

    The variance is that of a linear fit with a prior (a V-optimal design, chosen greedily), at the units of ``machine``.
    """
    if not rows:
        return []
    design = relative_work([exposed(row.work, machine) for row in rows], [row.predicted_seconds for row in rows], machine)
    covariance = np.eye(design.shape[1]) / PULL
    chosen: list[int] = []
    for _ in range(min(count, len(rows))):
        spread = design @ covariance
        gain = ((spread @ design.T) ** 2).sum(axis=0) / (1 + (spread * design).sum(axis=1))
        gain[chosen] = -1.0
        chosen.append(int(gain.argmax()))
        told = covariance @ design[chosen[-1]]
        covariance = covariance - np.outer(told, told) / (1 + design[chosen[-1]] @ told)
    return [rows[number] for number in chosen]


def measure(
    rows: Sequence[Configuration], job_of: JobOf, store: Store, ranks: int, steps: int, budget: float, say: Say
) -> dict[str, Measurement]:
    """Run each configuration that the store does not have, until ``budget`` seconds are spent; tell progress and time left."""
    known = store.measurements()
    missing = [row for row in rows if row.key not in known]
    start = time.monotonic()
    for number, row in enumerate(missing, 1):
        spent = time.monotonic() - start
        if spent > budget:
            say(f"the time budget of {budget:.0f} s is used up; {len(missing) - number + 1} runs remain for the next search")
            break
        left = spent / (number - 1) * (len(missing) - number + 1) if number > 1 else float("nan")
        say(f"run {number}/{len(missing)}: {row.key}" + (f"; {left:.0f} s left" if number > 1 else ""))
        found = Measurement(row.key, run_job(job_of(row), ranks, steps), dict(row.work), steps)
        store.put(found)
        known[row.key] = found
    return known


def run_job(job: Mapping[str, Any], ranks: int, steps: int) -> float:
    """Train a few steps in separate processes and return the median seconds of a step. Raises RunError with MS604."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-tune-") as folder:
        path, run = Path(folder) / "job.yaml", Path(folder) / "run"
        train = {**job.get("train", {}), "train_iters": steps + WARM_UP, "sample_tokens": 0, "eval_iters": 1}
        path.write_text(yaml.safe_dump({**job, "train": train}), encoding="utf-8")
        command = [sys.executable, "-m", "mindspeed", "pretrain", "-f", str(path), "--nproc", str(ranks), "--run", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            text = f"a measured run of mindspeed tune ended with exit status {done.returncode}"
            fix = Fix.advise("check the lines above; --mode white predicts without measuring")
            raise RunError([Problem("MS604", text, chain=tuple(done.stderr.splitlines()[-8:]), fix=fix)])
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        return float(statistics.median(seconds[WARM_UP:]))
