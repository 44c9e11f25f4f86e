"""Baselines on disk: an equal run is read, a different one is not, and a damaged file is none."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed import plan
from mindspeed.memory.byte_count import Bytes
from mindspeed.workbench.verification import pool
from mindspeed.workbench.verification.pool import WorkerPool, load, store
from mindspeed.workbench.verification.record import RankResult, RoutingChoice, TensorShard
from mindspeed.workbench.verification.shape import GPT, Recipe

RECIPE = Recipe(GPT, steps=1)
RESULTS = [RankResult(losses={(0, 0): 1.5})]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path))
    return tmp_path / "baselines"


def test_an_equal_run_is_read() -> None:
    base = plan(platform="cpu", level=0)
    assert load(base, RECIPE, 1) is None
    store(base, RECIPE, 1, RESULTS)
    assert load(base, RECIPE, 1) == RESULTS


def test_another_recipe_number_of_processes_plan_or_source_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    assert load(base, replace(RECIPE, steps=2), 1) is None
    assert load(base, RECIPE, 2) is None
    assert load(plan(platform="cpu", features=["recompute"]), RECIPE, 1) is None
    monkeypatch.setattr(pool, "_fingerprint", lambda: "another source")
    assert load(base, RECIPE, 1) is None


def test_a_damaged_file_is_none(folder: Path) -> None:
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    assert load(base, RECIPE, 1) is None


def test_a_file_that_names_other_code_is_none_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    class Run:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    (file,) = folder.iterdir()
    file.write_bytes(pickle.dumps(Run()))
    assert load(base, RECIPE, 1) is None
    assert not (tmp_path / "ran").exists()


def test_a_file_that_others_could_have_written_is_none(folder: Path) -> None:
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    file.chmod(0o602)
    assert load(base, RECIPE, 1) is None


def test_every_part_of_a_result_is_read(folder: Path) -> None:
    base = plan(platform="cpu", level=0)
    index = (slice(0, 1), *np.ix_([0, 1]))
    shard = TensorShard("gradient", "w", (2, 2), index, np.ones((1, 2), np.float32))
    choice = RoutingChoice((0, 0, "router"), (1,), (np.zeros(3, np.int16),))
    whole = TensorShard("optimizer state", "exp_avg on rank 0", (), ..., np.float64(3))  # type: ignore[arg-type]
    results = [RankResult({(0, 0): 1.5}, [shard, whole], activations=Bytes(1, 2), choices=[choice])]
    store(base, RECIPE, 1, results)
    assert repr(load(base, RECIPE, 1)) == repr(results)


def test_the_oldest_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT", 2)
    base = plan(platform="cpu", level=0)
    for steps in (1, 2, 3):
        store(base, replace(RECIPE, steps=steps), 1, RESULTS)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "file"))
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    assert load(base, RECIPE, 1) is None


def test_another_pool_does_not_run_it_again(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    monkeypatch.setattr(pool, "run", lambda *job: pytest.fail("the run was made again"))
    assert pool.run_once(base, RECIPE, 1) == RESULTS
