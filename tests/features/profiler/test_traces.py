"""Traces hold the asked steps and ranks, and name features."""

import gzip
import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed import registry
from mindspeed.features.profiler.feature import ProfilerArgs
from mindspeed.features.profiler.window import TraceWindow
from mindspeed.problems import RunError
from mindspeed.workbench.diagnostics.traces import summarize, summarize_folder
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe
from mindspeed.workbench.verification.training import train


def trained(
    pool: WorkerPool, folder: Path, processes: int = 1, steps: int = 4, sizes: Mapping[str, int] | None = None, **settings: Any
) -> Path:
    recipe = Recipe(LLAMA, steps=steps, global_batch_size=2)
    values = {"profiler": {"start": 1, "end": 3, "folder": str(folder), **settings}}
    world = {**recipe.world(), "world_size": processes, **(sizes or {})}
    plan = registry.plan(["profiler", "swiglu", "rms-norm"], values, platform="cpu", world=world)
    pool.call(train, processes, recipe, plan=plan)
    return folder


def test_a_trace_has_the_asked_steps_and_the_names_of_features(pool: WorkerPool, tmp_path: Path) -> None:
    (summary,) = summarize_folder(trained(pool, tmp_path), ["swiglu", "rms-norm"])
    assert (summary.rank, summary.steps) == (0, (2, 3))
    assert summary.times["feature"].keys() >= {"swiglu"}
    assert 0 < summary.times["feature"]["swiglu"][0] < summary.seconds
    assert "mindspeed::swiglu" in summary.times["operator"]


@pytest.mark.long
def test_a_run_that_ends_in_the_window_leaves_its_trace(pool: WorkerPool, tmp_path: Path) -> None:
    (summary,) = summarize_folder(trained(pool, tmp_path, steps=2, end=9), [])
    assert summary.steps == (2,)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "expected"), [([1], [1]), ([-1], [0, 1])])
def test_only_the_asked_ranks_are_traced(pool: WorkerPool, tmp_path: Path, ranks: list[int], expected: list[int]) -> None:
    found = summarize_folder(trained(pool, tmp_path, processes=2, ranks=ranks), [])
    assert [summary.rank for summary in found] == expected


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "share"), [({"tp": 2}, 1), ({"pp": 2}, 2), ({}, 2)], ids=["tp", "pp", "dp"])
def test_the_ranks_of_a_layout_trace_the_calls_of_one_process(pool: WorkerPool, tmp_path: Path, sizes, share: int) -> None:
    (whole,) = summarize_folder(trained(pool, tmp_path / "one"), ["swiglu", "rms-norm"])
    ranks = summarize_folder(trained(pool, tmp_path / "two", processes=2, ranks=[-1], sizes=sizes), ["swiglu", "rms-norm"])
    assert [summary.steps for summary in ranks] == [whole.steps] * 2
    _, calls = whole.times["operator"]["mindspeed::swiglu"]
    assert [summary.times["operator"]["mindspeed::swiglu"][1] for summary in ranks] == [calls // share] * 2


def test_a_step_that_fails_in_the_window_leaves_its_trace(tmp_path: Path) -> None:
    window = TraceWindow(ProfilerArgs(start=6, end=9, folder=str(tmp_path)), "cpu")
    assert window.step(6) is None
    for step in (7, 8):
        with suppress(ZeroDivisionError), window.step(step) or nullcontext():
            _ = torch.ones(2) @ torch.ones(2) if step == 7 else 1 / 0
    (summary,) = summarize_folder(tmp_path, [])
    assert summary.steps == (7, 8)
    assert window.step(9) is None, "the trace is written and no other begins"


def event(name: str, start: float, duration: float, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}


def test_time_is_counted_once() -> None:
    events = [
        event("ProfilerStep#7", 0, 100, "user_annotation"),
        event("swiglu", 10, 50, "user_annotation"),
        event("swiglu", 20, 10, "user_annotation"),
        event("aten::linear", 12, 30),
        event("aten::mm", 14, 20),
        event("c10d::allreduce_", 70, 10),
        event("cudaStreamSynchronize", 85, 5, "cuda_runtime"),
    ]
    summary = summarize(events, frozenset({"swiglu"}))
    assert summary.steps == (7,)
    assert summary.times["feature"] == {"swiglu": (50e-6, 1)}
    assert summary.times["operator"] == {"aten::mm": (20e-6, 1), "aten::linear": (10e-6, 1)}
    assert summary.times["collective"] == {"c10d::allreduce_": (10e-6, 1)}
    assert summary.times["wait"] == {"cudaStreamSynchronize": (5e-6, 1)}


def test_a_folder_without_a_trace_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        summarize_folder(tmp_path, [])
    assert "contains no trace" in caught.value.problems[0].message


def test_a_damaged_trace_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "trace.rank0.json.gz").write_bytes(gzip.compress(json.dumps({}).encode())[:-9])
    with pytest.raises(RunError) as caught:
        summarize_folder(tmp_path, [])
    assert "cannot be read" in caught.value.problems[0].message
