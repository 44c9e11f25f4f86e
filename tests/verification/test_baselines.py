"""Baselines on disk: an equal run is read, a different one is not, and a damaged file is none."""

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed import plan
from mindspeed.verification import baselines
from mindspeed.verification.baselines import load, store
from mindspeed.verification.pool import WorkerPool
from mindspeed.verification.record import RankResult
from mindspeed.verification.shape import GPT, Recipe

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
    monkeypatch.setattr(baselines, "_fingerprint", lambda: "another source")
    assert load(base, RECIPE, 1) is None


def test_a_damaged_file_is_none(folder: Path) -> None:
    base = plan(platform="cpu", level=0)
    store(base, RECIPE, 1, RESULTS)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    assert load(base, RECIPE, 1) is None


def test_the_oldest_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "KEPT", 2)
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
