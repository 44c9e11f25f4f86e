"""What the window and the ranks must be, from both sides."""

from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.plugins import MindSpeedError
from mindspeed.workbench.training.planning import window_problems
from tests.features.resolving import ask, refusals


def asked(**settings: object) -> list[str]:
    return refusals("profiler", settings={"profiler": settings})


def test_the_defaults_are_fine(tmp_path: Path) -> None:
    assert asked(folder=str(tmp_path)) == []
    assert asked(folder=str(tmp_path), cpu=True, memory=True, ranks=[-1], start=0, end=1) == []


def test_the_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert asked(folder=f"{tmp_path}/file") == [
        f"MS304 profiler: folder {tmp_path}/file is not writable | --set profiler.folder=FOLDER (a writable folder)"
    ]


def test_what_means_nothing_here_is_a_row() -> None:
    rows = {row.text for row in ask("profiler", settings={"profiler": {"level": "level1", "cpu": True}}).rows}
    assert {
        "profiler.level=level1 has no effect on cpu: only the NPU profiler has levels",
        "profiler.cpu has no effect on the cpu platform, whose traces always include CPU activity",
    } <= rows


@pytest.mark.parametrize(("last", "done", "fits"), [(12, 0, True), (11, 11, True), (10, 0, False), (30, 12, False)])
def test_the_window_is_inside_the_run(last: int, done: int, fits: bool) -> None:
    plan = registry.plan(["profiler"], platform="cpu", world={"world_size": 1})
    problems = window_problems(plan, last, done)
    text = f"profiler works in steps 11 to 12, but this run has steps {done + 1} to {last}"
    assert [problem.message for problem in problems] == ([] if fits else [text])


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(MindSpeedError):
        registry.plan(["profiler"], {"profiler": {"level": "level3"}}, platform="cpu")
