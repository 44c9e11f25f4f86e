"""A run that the installed Megatron saved is resumed by another version, and back where that one's format can be read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.megatron.versions.conftest import ROOT, Megatron
from tests.megatron.versions.test_pretrain import pretrain

pytestmark = pytest.mark.long
JOB = """\
features: [tensor-parallel, sequence-parallel, distributed-optimizer, rms-norm, swiglu]
settings: {tensor-parallel: {size: 2}}
platform: cpu
world: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, seq_length: 32,
        micro_batch_size: 2, global_batch_size: 8}
train: {style: llama, train_iters: 4, lr: 1.0e-3, warmup_iters: 0}
"""
NEW_FORMAT = Version("0.19")
FLAT_SHARDS = Version("0.15")


def here(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the last line, or whole answer, of the trainer with the installed Megatron."""
    command = [sys.executable, "-m", "mindspeed", "pretrain", *arguments, "--nproc", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    return done.returncode, json.loads(done.stdout if done.returncode else done.stdout.splitlines()[-1])


def test_a_run_goes_on_in_another_megatron_as_it_would_have_here(megatron: Megatron, tmp_path: Path) -> None:
    megatron.require_data_helpers()
    job, run, stays = tmp_path / "job.yaml", tmp_path / "run", tmp_path / "stays"
    job.write_text(JOB)
    status, saved = here("-f", str(job), "--run", str(run))
    assert status == 0
    shutil.copytree(run, stays)
    if Version(megatron.version) < FLAT_SHARDS:
        form = "distributed optimizer state in the shapes of the parameters, as saved by megatron-core 0.15 and newer"
        with pytest.raises(AssertionError, match=form):
            pretrain(megatron, "--resume", str(run), "--nproc", "2", "--train-iters", "8")
        return
    _, expected = here("--resume", str(stays), "--train-iters", "8")
    found = pretrain(megatron, "--resume", str(run), "--nproc", "2", "--train-iters", "8")
    assert found["heldout_loss"] == pytest.approx(expected["heldout_loss"], rel=1e-6)
    assert found["heldout_loss"] < saved["heldout_loss"]
    status, back = here("--resume", str(run), "--train-iters", "10")
    if Version(megatron.version) < NEW_FORMAT:
        assert status == 0, back
        assert back["heldout_loss"] < found["heldout_loss"]
        return
    (problem,) = back["problems"]
    assert (status, problem["code"]) == (1, "MS602")
    assert problem["message"].startswith(
        "the checkpoint uses the torch_dist format of megatron-core 0.19 and newer, without common.pt, which megatron-core "
    )
