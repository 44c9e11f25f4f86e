"""The newest state on the disks of the nodes: ``mindspeed pretrain --local-save``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.workbench.training.checkpoints import newest_complete
from tests.workbench.training.conftest import TINY, Run, job_of, log, losses


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
    job = (*TINY, "--data", text, "--nproc", 2, "--features", features, "--save-interval", 10, "--dropout", 0.1)
    job = (*job, *(("--tp", 2) if features == "tensor-parallel" else ()))
    local = (*job, "--auto-resume", run, "--local-save", nodes, "--local-save-interval", 3, "--train-iters", 2000)
    Run(*job, "--train-iters", 30, "--decay-iters", 2000, "--run", plain).done()
    killed_at(8, run, *local)  # no checkpoint in the run folder yet
    killed_at(19, run, *local)
    assert newest_complete(run) is not None
    Run(*local, "--train-iters", 30, "--decay-iters", 2000).done()
    assert losses(run) == losses(plain)
    starts = [row["step"] for before, row in zip(log(run), log(run)[1:]) if row["step"] < before["step"]]
    assert not nodes.exists() or not list(nodes.rglob("*.pt"))
    assert starts, starts


@pytest.mark.long
def test_the_checkpoint_of_the_run_folder_is_taken_where_a_node_was_replaced(text: str, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    run, nodes = tmp_path / "run", tmp_path / "nodes"
    job = (*TINY, "--data", text, "--nproc", 2, "--save-interval", 10, "--auto-resume", run, "--decay-iters", 2000)
    local = (*job, "--local-save", nodes, "--local-save-interval", 3)
    killed_at(14, run, *local, "--train-iters", 2000)
    (rank,) = nodes.glob("*/*/1")
    shutil.rmtree(rank)
    err = Run(*local, "--train-iters", 20).done().err
    assert "disks of the nodes" not in err
    assert min(losses(run)) == 1
