"""Copies of checkpoints in object storage: ``mindspeed pretrain --remote``. Here it is a folder, by a URL of fsspec."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import fsspec
import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError, RunError
from mindspeed.registry import probe
from mindspeed.workbench.training.checkpoints import MANIFEST, checkpoint_path, newest_complete, read_manifest, saved_steps
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.planning import plan_of_file
from mindspeed.workbench.training.storage import RemoteCopies, RemoteFolder, fetch_newest, storage_problems
from tests.workbench.training.conftest import TINY, MakeRun, Run, losses


@pytest.fixture
def copied(make_run: MakeRun, tmp_path: Path) -> tuple[Path, str]:
    """A run of three checkpoints, and a URL with copies of the newest two."""
    run, url = make_run(Layer("job file"), steps=(10, 20, 30)), f"memory://{tmp_path.name}/job"
    copies = RemoteCopies(url, 2, pytest.fail)
    for step in saved_steps(run):
        copies.add(checkpoint_path(run, step))
    copies.finish()
    return run, url


def test_the_newest_copies_are_kept_and_one_without_its_manifest_is_none(copied: tuple[Path, str]) -> None:
    _, url = copied
    assert RemoteFolder(url).steps() == [20, 30]
    fsspec.filesystem("memory").rm(f"{url}/step-00000030/{MANIFEST}")
    assert RemoteFolder(url).steps() == [20]


def test_a_run_folder_that_is_gone_gets_the_newest_copy_and_its_job_file(copied: tuple[Path, str]) -> None:
    run, url = copied
    before = (run / "job.yaml").read_text()
    shutil.rmtree(run)
    for _ in range(2):
        fetch_newest(str(run), TrainConfig(remote=url))
        assert saved_steps(run) == [30]
    assert read_manifest(checkpoint_path(run, 30)).step == 30
    assert (run / "job.yaml").read_text() == before


def test_a_run_folder_that_is_as_new_is_left_alone(copied: tuple[Path, str]) -> None:
    run, url = copied
    shutil.rmtree(checkpoint_path(run, 20))
    fetch_newest(str(run), TrainConfig(remote=url))
    assert saved_steps(run) == [10, 30]


def test_a_copy_without_all_its_files_is_not_fetched(copied: tuple[Path, str]) -> None:
    run, url = copied
    shutil.rmtree(run)
    fsspec.filesystem("memory").rm(f"{url}/step-00000030/metadata.json")
    with pytest.raises(RunError, match=r"MS602 .*step-00000030\.partial is damaged\n  because: metadata\.json is missing"):
        fetch_newest(str(run), TrainConfig(remote=url))
    assert newest_complete(run) is None


def test_a_copy_that_fails_is_reported_and_the_run_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run, reported = make_run(Layer("job file")), list[str]()
    copies = RemoteCopies(f"file://{tmp_path}/file/job", 2, reported.append)
    copies.add(checkpoint_path(run, 20))
    copies.finish()
    (text,) = reported
    assert text.startswith(f"{checkpoint_path(run, 20)} is complete, but cannot be copied to file://{tmp_path}/file/job: ")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("file:///tmp/copies", ""),
        (
            "s3://bucket/job",
            "MS501 train.remote needs the package s3fs, which is not installed on this machine\n  fix: pip install 's3fs'",
        ),
        (
            "bucket/job",
            "MS301 train.remote is 'bucket/job': it does not begin with a protocol that fsspec knows, such as s3://\n"
            "  fix: --remote s3://bucket/job",
        ),
        (
            "s4://bucket/job",
            "MS301 train.remote is 's4://bucket/job': it does not begin with a protocol that fsspec knows, such as s3://\n"
            "  fix: --remote s3://bucket/job",
        ),
    ],
)
def test_a_url_is_checked_before_the_start(url: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "".join(map(str, storage_problems(TrainConfig(remote=url)))) == text


def test_check_refuses_a_job_file_whose_remote_folder_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ResolutionError, match=r"MS501 train\.remote needs the package s3fs"):
        plan_of_file([Layer("job file", world={"num_layers": 2})], {"remote": "s3://bucket/job"}, probe("cpu"))


@pytest.mark.long
def test_a_run_continues_from_object_storage_where_its_folder_is_gone(text: str, tmp_path: Path) -> None:
    plain, run, url = tmp_path / "plain", tmp_path / "run", f"file://{tmp_path}/bucket/job"
    job = (*TINY, "--data", text, "--nproc", 2, "--save-interval", 2, "--decay-iters", 8)
    Run(*job, "--train-iters", 8, "--run", plain).done()
    Run(*job, "--train-iters", 4, "--auto-resume", run, "--remote", url).done()
    first = losses(run)
    shutil.rmtree(run)
    Run(*job, "--train-iters", 8, "--auto-resume", run, "--remote", url).done()
    assert first | losses(run) == losses(plain)
    assert RemoteFolder(url).steps() == [6, 8]
