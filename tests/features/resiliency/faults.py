"""Runs of two ranks in which rank 1 hangs: ``python -m tests.features.resiliency.faults`` writes what they print into the docs.

The transcripts are in docs/launching-at-scale.md, each between ``<!-- hang: FAULT -->`` and ``<!-- end -->``.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "launching-at-scale.md"
MARKED: Final = re.compile(r"(<!-- hang: (.*?) -->\n```\n)(.*?)(```\n<!-- end -->)", re.DOTALL)
STEP: Final = 3
SECONDS: Final = 8
"""Time without progress after which a rank hangs."""
FAULTS: Final = {
    "stopped process": "around_backward_step(self, unit)",
    "endless collective": "around_train_step(self, state)",
    "dead data loader": "around_data_load(self)",
}
"""The hook in which rank 1 fails."""
_FEATURE: Final = '''
import os, signal, subprocess, time

from mindspeed import plugins as ms


class Fault(ms.Feature):
    """Hangs in one step."""

    spec = ms.FeatureSpec(name="acme-fault", category=ms.Category.TOOL, constraints=(ms.After("resiliency"),))
    step = 0
    failed = False

    @ms.hookimpl
    def step_metrics(self, state):
        self.step = state.step

    @ms.hookimpl
    def {hook}:
        if os.environ["RANK"] == "0" or self.step != {step} - 1 or self.failed:
            return
        self.failed = True
        {fault}
'''
_STATEMENTS: Final = {
    "stopped process": 'subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]); '
    "os.kill(os.getpid(), signal.SIGSTOP)",
    "endless collective": "import torch; torch.distributed.all_reduce(torch.ones(7))",
    "dead data loader": "time.sleep(3600)",
}
_TINY: Final = (
    *("--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32", "--global-batch-size=4"),
    *("--micro-batch-size=2", "--lr=0.01", "--warmup-iters=1", "--eval-iters=2", "--sample-tokens=0", "--log-interval=1"),
)


def install(folder: Path, fault: str, seconds: float) -> None:
    """Lay a package with the fault out as an installer does."""
    info = folder / "acme_fault-1.0.dist-info"
    info.mkdir(parents=True)
    statement = _STATEMENTS[fault].replace("{seconds}", str(seconds))
    (folder / "acme_fault.py").write_text(_FEATURE.format(hook=FAULTS[fault], step=STEP, fault=statement))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fault\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-fault = acme_fault:Fault\n")


def run(fault: str, folder: Path, level: str, stopped: float = 20.0) -> tuple[int, str]:
    """Train with a fault of rank 1; return the exit status, and what the ranks and their launcher print."""
    install(folder / "packages", fault, stopped)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder / "packages"), str(ROOT)])}
    settings = (f"--set=resiliency.timeout={SECONDS}", f"--set=resiliency.level={level}")
    features = ("--features=resiliency,acme-fault", *settings, "--run=runs/job", "--train-iters=6")
    command = [sys.executable, "-m", "mindspeed", "pretrain", "--nproc=2", *_TINY, *features]
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout


def shown(text: str, folder: Path) -> str:
    """Return what ranks print of a hang, without paths and numbers of this machine."""
    hang = text[text.index("MS620") :]
    hang = hang[: hang.index("fix:")] + hang[hang.index("fix:") :].partition("\n")[0] + "\n"
    hang = hang.replace(f"{ROOT}/", "").replace(f"{folder}/", "")
    hang = re.sub(r"[^ ]*/site-packages/", "", hang)
    return re.sub(r"process \d+ on [^)]*", "process 4711 on node0", hang)


def refreshed(page: str) -> str:
    """Return the page with the transcripts of runs that are made now."""

    def one(found: re.Match[str]) -> str:
        with tempfile.TemporaryDirectory() as name:
            _, text = run(found[2], Path(name), "restart")
            return found[1] + shown(text, Path(name)) + found[4]

    return MARKED.sub(one, page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
