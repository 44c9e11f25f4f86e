"""The newest state on the disks of the nodes: ``mindspeed pretrain --local-save``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.workbench.training.checkpoints import newest_complete
from tests.workbench.training.conftest import TINY, Run, job_of, losses


def test_a_job_without_the_package_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed.workbench.training.storage.find_spec", lambda module: None)
    with pytest.raises(ResolutionError) as caught:
        job_of(Layer("command line", world={"num_layers": 2}), {"data": text, "local_save": "/tmp/nodes"})
    assert str(caught.value) == (
        "MS501 train.local_save needs the package nvidia-resiliency-ext, which is not installed on this machine\n"
        "  fix: pip install 'nvidia-resiliency-ext'"
    )


def killed_at(step: int, run: Path, *arguments: object) -> None:
    """Start a run, and kill all of its processes once it has done a step."""
    start = Run(*arguments, cold=True)
    start.wait_for_step(run, step)
    ranks = [start.rank(0), start.rank(1)]
    for process in (start.process, *ranks):
        process.kill()
    start.process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("features", ["distributed-optimizer", "tensor-parallel"])
def test_a_killed_run_continues_from_the_disks_of_its_nodes_with_the_same_numbers(
    text: str, tmp_path: Path, features: str
) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    plain, run, nodes = tmp_path / "plain", tmp_path / "run", tmp_path / "nodes"
    job = (*TINY, "--data", text, "--nproc", 2, "--features", features, "--dropout", 0.1, "--decay-iters", 2000)
    job = (*job, *(("--tp", 2) if features == "tensor-parallel" else ()))
    local = (*job, "--auto-resume", run, "--local-save", nodes, "--local-save-interval", 1)
    Run(*job, "--train-iters", 40, "--run", plain).done()
    killed_at(6, run, *local, "--train-iters", 2000)
    killed_at(12, run, *local, "--train-iters", 2000)
    assert newest_complete(run) is None
    err = Run(*local, "--train-iters", 40).done().err
    assert re.search(r"continues from step \d+, which is on the disks of the nodes", err)
    assert losses(run) == losses(plain)
    assert not list(nodes.rglob("*.pt"))


@pytest.mark.long
def test_the_checkpoint_of_the_run_folder_is_taken_where_a_node_was_replaced(text: str, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    run, nodes = tmp_path / "run", tmp_path / "nodes"
    job = (*TINY, "--data", text, "--nproc", 2, "--save-interval", 5, "--auto-resume", run, "--decay-iters", 2000)
    local = (*job, "--local-save", nodes, "--local-save-interval", 1)
    killed_at(8, run, *local, "--train-iters", 2000)
    (rank,) = nodes.glob("*/*/1")
    shutil.rmtree(rank)
    step = newest_complete(run)
    err = Run(*local, "--train-iters", 40).done().err
    assert "disks of the nodes" not in err
    assert f"step {step + 1}/40" in err
