"""Runs of Megatron-LM's own pretrain_gpt.py, as a user starts them, from the checkout that MEGATRON_LM_PATH names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shlex import split
from typing import Any, Final

import pytest

from tests import older_python

ROOT: Final = Path(__file__).resolve().parents[2]
VARIABLE: Final = "MEGATRON_LM_PATH"

TINY: Final = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 8 --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 "
    "--split 90,5,5 --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1"
)
"""A model and data that train in a second; no flag that only the CPU needs."""

LLAMA: Final = split(
    "--normalization RMSNorm --swiglu --ffn-hidden-size 96 --position-embedding-type rope --group-query-attention "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights"
)

MOE: Final = split("--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2")

SHARED: Final = split("--moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate")
"""One shared expert, as wide as the others, with a gate."""

LATENT: Final = split(
    "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 96 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 10 --rotary-scaling-factor 4 --mscale-all-dim 0.5 --rope-type yarn"
)

LOCAL: Final = split("--transformer-impl local")
"""Megatron's own layers, which have other parameter names than Transformer Engine's, its default."""

CPU: Final = LOCAL + split(
    "--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion"
)
"""What the platform sets by itself; stock runs say it, as they have no plan for Megatron-LM."""

LEFT_OUT: Final = ("MINDSPEED_", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Beginnings of the variables that a run does not inherit."""

ITERATION: Final = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")
_STOCK: Final = """
import runpy, sys
from dataclasses import replace
import mindspeed
from mindspeed.registry import probe
mindspeed.activate(mindspeed.plan(level=0, environment=replace(probe("cpu"), world_size=None)))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The platform and nothing else: no feature, no argument, no hook point on the training loop."""


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: its exit status, what it printed, ``{iteration: (loss, gradient norm)}`` as printed, its report."""

    status: int
    log: str
    steps: Mapping[int, tuple[str, str]]
    report: Mapping[str, Any]

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss, _ in self.steps.values()]

    def ended_well(self) -> Run:
        assert self.status == 0, self.log[-6000:]
        return self


def path() -> Path:
    """The checkout; skips the test where there is none."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} does not name a checkout of Megatron-LM")
    return Path(given).resolve()


class Checkout:
    """Starts scripts of one checkout, by default that of the variable; files go to ``folder``."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        self.root = root or path()
        self.folder = folder
        self.flags = [*TINY, "--vocab-size", "127" if minor_version(self.root) >= 16 else "4159"]
        build_helpers(self.root)

    def script_with_line(self, name: str = "pretrain_gpt.py") -> Path:
        """Megatron-LM's script with the one line added, as a user adds it."""
        source = (self.root / name).read_text(encoding="utf-8")
        script = self.folder / name
        script.write_text(source.replace("\nimport torch\n", "\nimport torch\nimport mindspeed.megatron_adaptor\n", 1))
        return script

    def adapted(self, nproc: int, *flags: str, **environment: str) -> Run:
        """The script with the line, under torchrun."""
        return self._torchrun(nproc, [str(self.script_with_line()), *self.flags, *flags], environment)

    def launched(self, nproc: int, options: Sequence[str], *flags: str, **environment: str) -> Run:
        """Megatron-LM's script as it is, under ``mindspeed run``."""
        launcher = [sys.executable, "-m", "mindspeed", "run", "--nproc", str(nproc), *options, "--"]
        return self.run([*launcher, str(self.root / "pretrain_gpt.py"), *self.flags, *flags], environment, also=False)

    def stock(self, nproc: int, *flags: str) -> Run:
        """Megatron-LM's script as it is, on the platform alone."""
        script, words = self._stock_command(flags)
        return self._torchrun(nproc, [script, *words], {})

    def _stock_command(self, flags: Sequence[str]) -> tuple[str, list[str]]:
        """The script that starts Megatron-LM's on the platform alone, and its arguments."""
        starter = self.folder / "stock.py"
        starter.write_text(_STOCK)
        return str(starter), [str(self.root / "pretrain_gpt.py"), *self.flags, *CPU, *flags]

    def _torchrun(self, nproc: int, command: Sequence[str], environment: Mapping[str, str]) -> Run:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        return self.run([*launcher, "--nproc-per-node", str(nproc), *command], environment)

    def run(self, command: Sequence[str], environment: Mapping[str, str], also: bool = True) -> Run:
        """Run a command to its end. ``also`` puts the checkout on the path for scripts that lie elsewhere."""
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        search = [*older_python.FOLDERS, *[str(self.root)] * also, str(ROOT)]
        settings = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(search),
            "OMP_NUM_THREADS": "1",
            "MINDSPEED_PLATFORM": "cpu",
            "MINDSPEED_REPORT": str(report),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            cwd=self.folder,
            env={**inherited, **settings, **environment},
        )
        steps = {int(number): (loss, norm) for number, loss, norm in ITERATION.findall(done.stdout)}
        return Run(done.returncode, done.stdout, steps, json.loads(report.read_text()) if report.is_file() else {})


def minor_version(root: Path) -> int:
    """15 for Megatron-LM 0.15.3, whose made-up tokens go up to 4095 whatever the vocabulary is."""
    found = re.search(r"^MINOR = (\d+)", (root / "megatron" / "core" / "package_info.py").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


@lru_cache(maxsize=2)
def build_helpers(root: Path) -> None:
    """Build Megatron's data helpers for this Python; its Makefile would ask the first python3-config on the path."""
    folder = root / "megatron" / "core" / "datasets"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (folder / f"helpers_cpp{suffix}").exists():
        environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
        subprocess.run(["make", "-C", str(folder), f"LIBEXT={suffix}"], check=True, capture_output=True, env=environment)
