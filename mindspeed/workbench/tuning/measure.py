"""Measured steps: the configurations that tell most, short runs of them, and one file a run, so a killed search loses one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from mindspeed._version import __version__
from mindspeed.engine.resolution.environment import installed_version
from mindspeed.files.cache_folder import require_trusted
from mindspeed.files.step_log import LOG, read_log
from mindspeed.files.text_files import write_files
from mindspeed.job import arithmetic
from mindspeed.ops.instruction_sets import processor_model
from mindspeed.problems import Fix, Problem, RunError, marked
from mindspeed.workbench.training.run_numbers import WARM_UP
from mindspeed.workbench.tuning.search import Configuration
from mindspeed.workbench.tuning.time import PULL, Machine, exposed, relative_work

MACHINE: Final = "machine"
"""File of the facts of a machine, in its folder of a store."""
JobOf = Callable[[Configuration], Mapping[str, Any]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The median seconds of a step of one configuration, and the work that was predicted of it."""

    key: str
    seconds: float
    work: Mapping[str, float]
    steps: int


def machine_facts(device: str) -> dict[str, str]:
    """Return the facts that a measurement depends on in addition to the job: a store of other facts is stale."""
    return {
        "mindspeed": f"{__version__} {_source_digest()}",
        "torch": installed_version("torch") or "none",
        "megatron": installed_version("megatron-core") or "none",
        "device": device,
        "processor": processor_model(),
        "cores": str(os.cpu_count()),
    }


def _source_digest() -> str:
    """Hash the sources of the model of time, by which the work of a measurement was counted."""
    files = [Path(__file__).with_name("time.py"), Path(arithmetic.__file__)]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def digest(content: Mapping[str, Any]) -> str:
    """Hash a mapping by its content."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


class Store:
    """The measurements of one model on one machine, in a separate folder, next to the speeds of the machine's products."""

    def __init__(self, folder: Path, facts: Mapping[str, str], model: Mapping[str, Any]) -> None:
        self.root, self.facts = folder, dict(facts)
        self.machine = folder / digest(facts)
        self.folder = self.machine / digest(model)

    def measurements(self) -> dict[str, Measurement]:
        """Return every measurement by the key of its configuration; a damaged file counts as none.

        Raises MindSpeedError with MS518 for a file in the cache that other users could have written.
        """
        return {found.key: found for found in _measurements(self.folder)}

    def file_of(self, key: str) -> Path:
        """Return the file of a configuration's measurement, whether it exists or not."""
        return self.folder / f"{digest({'key': key})}.json"

    def file_of_products(self, dtype: str) -> Path:
        """Return the file of the speeds of products, whether it exists or not."""
        return self.machine / f"products-{dtype}.json"

    def put(self, measurement: Measurement) -> None:
        """Write a measurement. Raises PlatformError with MS516 where it cannot be written."""
        self.write({self.file_of(measurement.key): asdict(measurement)})

    def write(self, contents: Mapping[Path, Mapping[str, Any]]) -> None:
        """Write files of this machine and its facts. Raises PlatformError with MS516 where one cannot be written.

        Without files it reports, before anything is measured, whether results can be kept.
        """
        texts = {path: json.dumps(content) + "\n" for path, content in contents.items()}
        facts = {self.machine / MACHINE: json.dumps(self.facts, indent=2) + "\n"}
        write_files(facts | texts, fix=marked("--store FOLDER with a writable folder"), is_private=True)

    def staleness(self) -> Problem | None:
        """Return MS346 where the store has measurements of other machines or versions, and none of this one."""
        machines = sorted(self.root.glob(f"*/{MACHINE}")) if self.root.is_dir() else []
        if _are_measured(self.machine):
            return None
        others = (path for path in machines if path.parent != self.machine and _are_measured(path.parent))
        if (then := next(filter(None, map(read_mapping, others)), None)) is None:
            return None
        pairs = ((name, now, then.get(name)) for name, now in self.facts.items())
        different = [f"{name} is {now}, was {before}" for name, now, before in pairs if now != before]
        text = f"the measurements in {self.root} are from another machine or version: {'; '.join(different)}"
        fix = Fix.advise(
            "measure again with mindspeed tune --calibrate N (up to N configurations), or give another folder with --store"
        )
        return Problem("MS346", text, where=str(self.root), fix=fix)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the contents of a file of a store; a damaged or missing file is empty.

    Raises MindSpeedError with MS518 for a file in the cache that other users could have written.
    """
    require_trusted(path.parent, path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_amount(value: object) -> bool:
    """Return whether a value is a finite number that is not less than 0, as the seconds of anything are."""
    return isinstance(value, int | float) and 0 <= value < math.inf


def _are_measured(machine: Path) -> bool:
    return any(any(_measurements(folder)) for folder in machine.iterdir() if folder.is_dir()) if machine.is_dir() else False


def _measurements(folder: Path) -> Iterator[Measurement]:
    """Yield the measurements in the folder of a model, without damaged files."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with suppress(TypeError):
            found = Measurement(**read_mapping(path))
            if is_amount(found.seconds) and found.seconds:
                yield found


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
        projection = covariance @ design[chosen[-1]]
        covariance = covariance - np.outer(projection, projection) / (1 + design[chosen[-1]] @ projection)
    return [rows[number] for number in chosen]


def measure(
    rows: Sequence[Configuration], job_of: JobOf, store: Store, ranks: int, steps: int, budget: float, say: Say
) -> dict[str, Measurement]:
    """Run each configuration that the store does not have, until ``budget`` seconds are spent; tell progress and time left."""
    known = store.measurements()
    missing = [row for row in rows if row.key not in known]
    if missing:
        store.write({})
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
        seconds = [row["seconds"] for row in read_log(run / LOG) if "seconds" in row]
        return float(statistics.median(seconds[WARM_UP:]))
