"""Plain megatron-core on the cpu platform: every layout on four processes gives the losses of one process.

All cases run with poison, so that a wait that Megatron or the platform misses would show as NaN.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("layout_cases.py")
SHARDED = ("--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
CHUNKED = ("--pp", "2", "--vpp", "2", "--overlap-p2p")
SEQUENCE = ("--tp", "2", "--sequence-parallel")
EXPERTS = ("--experts", "4")

MODELS = {"gpt": (), "llama": ("--llama",), "experts": EXPERTS, "bf16": ("--dtype", "bf16"), "fp16": ("--dtype", "fp16")}
LAYOUTS = {
    "tp2 with sequence parallelism": ("llama", SEQUENCE),
    "pp4": ("gpt", ("--pp", "4")),
    "pp2 with batched p2p": ("gpt", ("--pp", "2", "--batched-p2p")),
    "pp2 x vpp2 with overlapped p2p, sharded and overlapped dp2": ("gpt", (*CHUNKED, *SHARDED)),
    "dp4 with the distributed optimizer and both overlaps": ("gpt", SHARDED),
    "ep2 x tp2 with all-to-all": ("experts", ("--ep", "2", *SEQUENCE)),
    "tp2 with whole experts": ("experts", ("--etp", "1", "--dispatcher", "alltoall", *SEQUENCE)),
    "dp4 with experts in halves": ("experts", ("--etp", "2", "--dispatcher", "alltoall")),
    "dp4 x ep2 with experts in halves": (
        "experts",
        ("--ep", "2", "--etp", "2", "--dispatcher", "alltoall", "--distributed-optimizer"),
    ),
    "ep4 with all-gather": ("experts", ("--ep", "4", "--dispatcher", "allgather")),
    "fp16 with the distributed optimizer": ("fp16", ("--distributed-optimizer",)),
    "bf16 with tp2 and sequence parallelism": ("bf16", SEQUENCE),
}
DROPOUT = (*SEQUENCE, "--dropout", "0.1")


def losses_of(nproc: int, cases: dict[str, tuple[str, ...]], search_path: str = "") -> dict[str, list[float]]:
    """Losses by case; ``search_path`` comes before the places where this process finds Megatron."""
    python = [sys.executable] if search_path else warm_python()  # a process that is forked has its Megatron already
    command = [*python, "-m", "mindspeed", "run", "--platform", "cpu", "--nproc", str(nproc)]
    command += ["--set", "device-emulation.poison=true", "--", str(SCRIPT), json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if search_path:
        environment["PYTHONPATH"] = os.pathsep.join([search_path, *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def alone():
    return losses_of(1, alone_cases())


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return losses_of(4, together_cases(tmp_path_factory.mktemp("checkpoints")))


def alone_cases() -> dict[str, tuple[str, ...]]:
    return {**MODELS, "six steps": ("--steps", "6")}


def together_cases(folder: Path) -> dict[str, tuple[str, ...]]:
    """Every layout, and checkpoints between them in ``folder``."""
    sharded, whole = str(folder / "sharded"), str(folder / "whole")
    layouts = {name: (*MODELS[model], *flags) for name, (model, flags) in LAYOUTS.items()}
    recompute = {
        "stored": DROPOUT,
        "full": (*DROPOUT, "--recompute", "full"),
        "selective": (*DROPOUT, "--recompute", "selective"),
    }
    checkpoints = {
        "save sharded tp2": (*SEQUENCE, "--distributed-optimizer", "--save", sharded),
        "load sharded pp2 x vpp2": (*CHUNKED, "--distributed-optimizer", "--load", sharded),
        "load sharded dp4": ("--distributed-optimizer", "--load", sharded),
        "save whole pp2": ("--pp", "2", "--save", whole),
        "load whole tp2": ("--tp", "2", "--load", whole),
    }
    return {**layouts, **recompute, **checkpoints}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.guards(48, processes=True)
def test_a_layout_gives_the_losses_of_one_process(name, alone, together):
    model = LAYOUTS[name][0]
    tolerance = {"bf16": 1e-3, "fp16": 1e-4}.get(model, 1e-6)
    assert together[name] == pytest.approx(alone[model], rel=tolerance, abs=0)


def test_half_precision_follows_single_precision(alone):
    assert alone["bf16"] == pytest.approx(alone["gpt"], rel=2e-3)
    assert alone["fp16"] == pytest.approx(alone["gpt"], rel=2e-3)
    assert alone["bf16"] != alone["gpt"] != alone["fp16"]


def test_recomputed_dropout_is_the_same_bit_for_bit(alone, together):
    assert together["full"] == together["stored"]
    assert together["selective"] == together["stored"]
    assert together["stored"] != pytest.approx(alone["gpt"], rel=1e-5)


@pytest.mark.parametrize("name", ["load sharded pp2 x vpp2", "load sharded dp4", "load whole tp2"])
def test_a_checkpoint_continues_on_another_layout(name, alone, together):
    assert together[name] == pytest.approx(alone["six steps"][3:], rel=1e-6, abs=0)
