"""Runs of two ranks in which rank 1 fails: ``python -m tests.features.resiliency.faults`` writes what they print into the docs.

The transcripts are in docs/launching-at-scale.md, each between ``<!-- fault: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "launching-at-scale.md"
MARKED: Final = re.compile(r"(<!-- fault: (.*?) -->\n```\n)(.*?)(```\n<!-- end -->)", re.DOTALL)
SECONDS: Final = 15
"""Time without progress after which a rank hangs; more than an idle machine needs for the first step."""


class Fault(NamedTuple):
    """The hook in which rank 1 fails once, its statement there, the step, and options of the run."""

    hook: str
    statement: str
    step: int = 3
    options: tuple[str, ...] = (f"--set=resiliency.timeout={SECONDS}", "--set=resiliency.level=restart")


FAULTS: Final = {
    "stopped process": Fault("around_backward_step(self, unit)", "os.kill(os.getpid(), signal.SIGSTOP)"),
    "endless collective": Fault(
        "around_train_step(self, state)", "import torch; torch.distributed.all_reduce(torch.ones(7)); time.sleep(3600)"
    ),
    "dead data loader": Fault("around_data_load(self)", "time.sleep(3600)"),
    "NaN at step 7": Fault(
        "gradients_ready(self, chunks, gradients)", "gradients[0][1].fill_(float('nan'))", 7, ("--on-nan=skip",)
    ),
}
ROLLBACK: Final = FAULTS["NaN at step 7"]._replace(options=("--on-nan=rollback", "--save-interval=5"))
_FEATURE: Final = '''
import os, signal, time

from mindspeed import plugins as ms


class Failure:
    def __enter__(self):
        {inside}

    def __exit__(self, *error):
        pass


class Failing(ms.Feature):
    """Fails once."""

    spec = ms.FeatureSpec(name="acme-fault", category=ms.Category.TOOL, constraints=(ms.After("resiliency"),))
    failed = False
    step = 0

    @ms.hookimpl
    def step_metrics(self, state):
        self.step = state.step

    @ms.hookimpl
    def {hook}:
        if os.environ["RANK"] == "1" and self.step == {step} - 1 and not self.failed:
            self.failed = True
            {outside}
'''
_TINY: Final = (
    *("--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32", "--global-batch-size=4"),
    *("--micro-batch-size=2", "--lr=0.01", "--warmup-iters=1", "--eval-iters=2", "--sample-tokens=0", "--log-interval=1"),
)


def install(folder: Path, fault: Fault) -> None:
    """Lay a package with the fault out as an installer does."""
    info = folder / "acme_fault-1.0.dist-info"
    info.mkdir(parents=True)
    is_around = fault.hook.startswith("around")
    inside, outside = (fault.statement, "return Failure()") if is_around else ("pass", fault.statement)
    (folder / "acme_fault.py").write_text(_FEATURE.format(hook=fault.hook, step=fault.step, inside=inside, outside=outside))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fault\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-fault = acme_fault:Failing\n")


def run(fault: Fault, folder: Path) -> tuple[int, str]:
    """Train with a fault; return the exit status, and what the ranks and their launcher print."""
    install(folder / "packages", fault)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder / "packages"), str(ROOT)])}
    request = ("--features=resiliency,acme-fault", "--auto-resume=runs/job", "--train-iters=10", *fault.options)
    command = [sys.executable, "-m", "mindspeed", "pretrain", "--nproc=2", *_TINY, *request]
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    return done.returncode, done.stdout


def shown(text: str, folder: Path) -> str:
    """Return what ranks print of a fault, without paths and numbers of this machine."""
    if "MS620" not in text:
        return "".join(line for line in text.splitlines(keepends=True) if re.match(r"step [678]/", line))
    hang = re.search(r"MS620 .*?\n  fix: .*?\n", text, re.DOTALL)
    assert hang is not None
    short = hang[0].replace(f"{ROOT}/", "").replace(f"{folder}/", "")
    return re.sub(r"process \d+ on [^)]*", "process 4711 on node0", re.sub(r"\S*/site-packages/", "", short))


def refreshed(page: str) -> str:
    """Return the page with the transcripts of runs that are made now."""

    def transcript(found: re.Match[str]) -> str:
        with tempfile.TemporaryDirectory() as name:
            return found[1] + shown(run(FAULTS[found[2]], Path(name))[1], Path(name)) + found[4]

    return MARKED.sub(transcript, page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
