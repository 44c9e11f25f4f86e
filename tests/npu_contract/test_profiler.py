"""The profiler's calls of torch_npu, made with the real package: names, options and what they become."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch_npu

from mindspeed.features.profiler import npu
from mindspeed.features.profiler.feature import ProfilerArgs

SOURCE = Path(npu.__file__)
KEYWORDS = sorted(
    {keyword.arg for call in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(call, ast.Call) for keyword in call.keywords}
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder of its own, in which a profiler that has not started leaves profiler_info.json when it is deleted."""
    monkeypatch.chdir(tmp_path)
    yield
    gc.collect()


@pytest.mark.parametrize("level", ["level0", "level1", "level2"])
@pytest.mark.parametrize("on", [False, True])
def test_settings_reach_the_profiler(tmp_path: Path, capfd: pytest.CaptureFixture[str], level: str, on: bool) -> None:
    args = ProfilerArgs(level=level, cpu=on, stack=on, memory=on, shapes=on, folder=str(tmp_path))
    made = npu.make_profiler(args, 3).prof_if
    names = torch_npu.profiler
    activities = {names.ProfilerActivity.NPU} | ({names.ProfilerActivity.CPU} if on else set())
    assert set(made.activities) == activities
    assert (made.record_shapes, made.profile_memory, made.with_stack) == (on, on, on)
    assert made.experimental_config._profiler_level == getattr(names.ProfilerLevel, level.capitalize())
    metrics = names.AiCMetrics.AiCoreNone if level == "level0" else names.AiCMetrics.PipeUtilization
    assert made.experimental_config._aic_metrics == metrics
    assert "reset" not in "".join(capfd.readouterr()), "torch_npu puts no option right"


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_misspelt_argument_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], keyword: str) -> None:
    """By an error, or by a line that torch_npu prints in its place."""
    tree = ast.parse(SOURCE.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == keyword:
            node.arg = f"{keyword}s"
    planted: dict[str, Any] = {"__name__": "planted"}
    exec(compile(tree, str(SOURCE), "exec"), planted)
    told = ""
    try:
        planted["make_profiler"](ProfilerArgs(folder=str(tmp_path)), 0)
    except TypeError as error:
        told = str(error)
    assert f"unexpected keyword argument '{keyword}s'" in told + capfd.readouterr().out


def test_a_group_carries_its_name() -> None:
    assert npu.named_group("tp").hccl_config == {"group_name": "tp"}
