"""Runs that go on from a converted checkpoint, with the layers that it is converted to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.workbench.training.checkpoints import find_checkpoint
from tests.workbench.training.conftest import TINY, Run, losses

NAME: Final = "transformer-engine-layers"
ENGINE: Final = ("--features", NAME)
LOCAL: Final = ("--without", NAME)
EXPERTS: Final = ("--num-experts", "4", "--features", "moe-grouped-gemm")

SHARDED: Final = ("--num-experts", "4", "--features", "distributed-optimizer")
MODELS: Final = {
    "dense": (),
    "grouped experts": EXPERTS,
    "experts": ("--num-experts", "4"),
    "experts, distributed optimizer": SHARDED,
}


def convert(run: Path, target: Path, kind: str) -> None:
    done = CliRunner().invoke(main, ["checkpoint", "convert", str(run), str(target), "--to", kind], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_converted_run_goes_on_to_the_last_digit(text: str, tmp_path: Path, model: tuple[str, ...]) -> None:
    start = (*TINY, "--data", text, *model, "--decay-iters", 6)
    run = {name: tmp_path / name for name in ("local", "engine", "there", "back")}
    Run(*start, "--run", run["local"], "--train-iters", 3).done()
    shutil.copytree(run["local"], run["engine"])
    refused = Run("--resume", run["engine"], *ENGINE, "--train-iters", 6).done(1)
    command = f"mindspeed checkpoint convert {run['engine']} {run['engine']}-transformer-engine --to transformer-engine"
    assert refused.err == (
        "MS613 the checkpoint contains Megatron's local layers, but the job builds Transformer Engine's layers: their "
        "parameters have different names\n"
        f"  where: {find_checkpoint(run['engine'])}\n"
        f"  fix: {command}\n"
    )
    convert(run["local"], run["there"], "transformer-engine")
    convert(run["there"], run["back"], "local")
    Run("--resume", run["local"], "--train-iters", 6).done()
    Run("--resume", run["back"], "--train-iters", 6).done()
    Run("--resume", run["there"], *ENGINE, "--train-iters", 6).done()
    after = {name: {step: loss for step, loss in losses(folder).items() if step > 3} for name, folder in run.items()}
    assert list(after["local"]) == [4, 5, 6]
    assert after["back"] == after["local"]
    assert after["there"] == after["local"]


@pytest.mark.long
def test_a_run_of_transformer_engines_layers_goes_on_with_local_ones(text: str, tmp_path: Path) -> None:
    run, local = tmp_path / "engine", tmp_path / "local"
    start = (*TINY, "--data", text, "--num-experts", 4, *ENGINE, "--decay-iters", 6)
    Run(*start, "--run", run, "--train-iters", 3).done()
    convert(run, local, "local")
    Run("--resume", run, "--train-iters", 6).done()
    Run("--resume", local, *LOCAL, "--train-iters", 6).done()
    assert {step: loss for step, loss in losses(run).items() if step > 3} == losses(local)
