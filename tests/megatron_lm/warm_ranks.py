"""Runs of Megatron-LM's pretrain_gpt.py in processes that are forked from one with its modules imported.

    python -m tests.megatron_lm.warm_ranks CHECKOUT MODULE...

reads a job on each line of stdin and prints its exit status. A run costs 2 s of CPU time, and 8 s in a new process.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests import older_python
from tests.forked_ranks import run_ranks
from tests.megatron_lm.checkout import ITERATION, LEFT_OUT, ROOT, Checkout, Run

_FROM_THE_START: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "PYTHONHASHSEED": "0",
}
"""What ``mindspeed run`` sets for the feature deterministic, and a process that is forked cannot set later."""
_MODULES: Final = (
    "megatron.training",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "gpt_builders",
    "model_provider",
    "mindspeed.megatron_lm.training_plan",
    "mindspeed.workbench.lint.locked_command",
)


class WarmCheckout(Checkout):
    """A checkout whose script runs in forked processes."""

    def __init__(self, folder: Path, root: Path, modules: Sequence[str] = _MODULES) -> None:
        super().__init__(folder, root)
        search = [*older_python.FOLDERS, str(ROOT), str(root)]
        variables = {
            "PYTHONPATH": os.pathsep.join(search),
            "OMP_NUM_THREADS": "1",
            "MINDSPEED_PLATFORM": "cpu",
        } | _FROM_THE_START
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(root), *modules]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=inherited | variables, **pipes)
        self._script = self.script_with_line()
        self._runs = 0

    def at(self, folder: Path) -> WarmCheckout:
        """The same checkout and process, with another folder for files."""
        other = copy(self)
        other.folder, other._runs = folder, 0
        other._script = other.script_with_line()
        return other

    def adapted(self, nproc: int, *flags: str, **environment: str) -> Run:
        """The script with the line, as `Checkout.adapted` runs it."""
        return self.train(nproc, *self.flags, *flags, variables=environment)

    def stock(self, nproc: int, *flags: str) -> Run:
        """Megatron-LM's script as it is, on the platform alone."""
        script, words = self._stock_command(flags)
        return self._run({"script": script, "nproc": nproc, "flags": words}, 240, {})

    def train(
        self,
        nproc: int,
        *flags: str,
        limit: float = 240,
        variables: Mapping[str, str] | None = None,
        script: Path | None = None,
    ) -> Run:
        """Run a script, pretrain_gpt.py with the line by default, on ranks of its own; end it after ``limit`` seconds."""
        return self._run({"script": str(script or self._script), "nproc": nproc, "flags": flags}, limit, variables or {})

    def convert(self, source: Path, target: Path) -> None:
        """Convert a checkpoint to Transformer Engine's names."""
        words = ["checkpoint", "convert", str(source), str(target), "--to", "transformer-engine"]
        self._run({"script": "", "nproc": 1, "flags": words}, 60, {}).ended_well()

    def _run(self, job: dict[str, Any], limit: float, variables: Mapping[str, str]) -> Run:
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        folder.mkdir()
        report = folder / "report.json"
        job |= {"folder": str(folder), "limit": limit, "variables": {"MINDSPEED_REPORT": str(report), **variables}}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status = json.loads(self._process.stdout.readline())
        log = "\n".join((folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(job["nproc"]))
        steps = {int(number): (loss, norm) for number, loss, norm in ITERATION.findall(log)}
        return Run(status, log, steps, json.loads(report.read_text()) if report.is_file() else {})

    def close(self) -> None:
        """End the process that forks."""
        self._process.communicate()


def warm(root: str, modules: Sequence[str]) -> None:
    """Import Megatron-LM under the platform's plan and undo the plan."""
    from dataclasses import replace
    from importlib import import_module

    import mindspeed
    from mindspeed.registry import probe

    sys.path.append(root)
    mindspeed.activate(mindspeed.plan(level=0, environment=replace(probe("cpu"), world_size=None)))
    for name in modules:
        import_module(name)
    mindspeed.deactivate()


def serve() -> None:
    """Run each job of stdin and print its exit status: that of the first rank that failed, 0 without one."""
    for line in sys.stdin:
        job = json.loads(line)
        statuses = run_ranks(job["nproc"], partial(_run_script, job), job["limit"], Path(job["folder"]))
        print(json.dumps(next(filter(None, statuses.values()), 0)), flush=True)


def _run_script(job: Mapping[str, Any], rank: int) -> int:
    os.chdir(job["folder"])
    os.environ.update(job["variables"])
    sys.argv = [job["script"], *job["flags"]]
    if job["script"]:
        runpy.run_path(job["script"], run_name="__main__")
    else:
        runpy.run_module("mindspeed", run_name="__main__")
    return 0


if __name__ == "__main__":
    warm(sys.argv[1], sys.argv[2:])
    serve()
