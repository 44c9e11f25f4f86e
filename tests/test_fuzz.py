"""Whatever is given to mindspeed, it ends soon with a documented exit status, or with problems that say what to do.

The inputs are drawn from a fixed seed: 200 in the default run, 5,000 in the long one.
"""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.planning.checkpoint_state import FILE, read_record
from mindspeed.engine.planning.lock import read_lock
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.job_file import load_job_file
from mindspeed.engine.resolution.request import layer_from_environment
from mindspeed.job.fields import FIELDS
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.training.checkpoints import MANIFEST, read_manifest

SECONDS = 20.0
STATUSES = (0, 1, 2, 3)
WITH_FIX = ("MS301", "MS305", "MS509")
"""Codes of inputs that cannot be read."""
LAPTOP = made_up("cpu", "0.16.1")

WORDS = st.sampled_from(
    [
        *("", "~", "true", "no", "0", "-1", "2", "1e400", ".nan", ".inf", "2024-13-99", "1:30", "9" * 5000, "[" * 3000),
        *("{a: 1}", "[0]", "!!int x", "&a [*a]", "*a", "(0,)", "x" * 300, "\u00a0", "\u3000", "\x0c", "\u202e", "'", '"'),
        *("$(id)", "../..", "recompute"),
    ]
)
TEXT = st.one_of(WORDS, st.text(max_size=12))
NAMES = st.sampled_from(["recompute", "tensor-parallel", "rms-norm", "profiler", "swiglu", "ring-attention"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
ASSIGNMENTS = st.tuples(st.one_of(NAMES, TEXT), st.sampled_from(["granularity", "size", "ranks", "x", ""]), TEXT)
FLAGS = st.sampled_from([f"--{name.replace('_', '-')}" for name in FIELDS] + ["--strict", "--set", "--without", "--json", "-f"])


@st.composite
def job_texts(draw: Any) -> str:
    """Job files: right keys with any values, or any text."""
    if draw(st.booleans()):
        return "\n".join(draw(st.lists(TEXT, max_size=6)))
    keys = draw(st.lists(st.sampled_from(["features", "settings", "world", "level", "strict", "train", "x"]), max_size=4))
    lines = []
    for key in keys:
        inner = draw(st.one_of(TEXT, VALUES.map(lambda value: json.dumps(value))))
        field = draw(st.sampled_from([*FIELDS, "recompute"]))
        lines.append(f"{key}: {inner}" if draw(st.booleans()) else f"{key}: {{{field}: {inner}}}")
    return "\n".join(lines)


def mutations(data: Any) -> st.SearchStrategy[Any]:
    """JSON data in which one value, at any place, is another one."""

    @st.composite
    def mutated(draw: Any) -> Any:
        whole = json.loads(json.dumps(data))
        place, key = {"": whole}, ""
        while isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if draw(st.booleans()):
            place[key] = draw(VALUES)
        elif isinstance(place, dict):
            del place[key]
        return place.get("", whole) if "" in place else whole

    return mutated()


@cache
def plan_data() -> Any:
    return registry.plan(["recompute"], platform="cpu").to_json()


MANIFEST_DATA = {
    "format": 1,
    "step": 1,
    "samples": 1,
    "model": {"num_layers": 1},
    "optimizer": "adam",
    "data": "d",
    "layout": {"tp": 1},
    "plan": "x",
    "files": {"a": 1},
}
FEATURE = {"name": "a", "distribution": "b", "version": "1", "settings": {"x": 1}, "state": {"kind": "none"}}
RECORD_DATA = {"format": 1, "plan": "x", "content": {"a": "b"}, "features": [FEATURE]}


def ends_well(call: Callable[[], object]) -> None:
    """Require that a call ends soon, with a result or with problems."""
    begin, problems = time.perf_counter(), None
    try:
        call()
    except MindSpeedError as error:
        problems = error.problems
    assert problems is None or problems
    assert [str(problem) for problem in problems or () if problem.code in WITH_FIX and not problem.fix] == []
    assert time.perf_counter() - begin < SECONDS


def write(folder: Path, name: str, data: Any) -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8", errors="surrogatepass")
    return path


def job(folder: Path, text: str) -> None:
    layer = load_job_file(write(folder, "job.yaml", text)).layer
    registry.resolve([layer], LAPTOP)


def setting(folder: Path, assignment: tuple[str, str, str]) -> None:
    feature, name, value = assignment
    layer = layer_from_environment({"MINDSPEED_SET": f"{feature}.{name}={value}", "MINDSPEED_FEATURES": feature})
    registry.resolve([layer], LAPTOP)


def environment(folder: Path, values: dict[str, str]) -> None:
    registry.resolve([layer_from_environment(values)], LAPTOP)


def arguments(folder: Path, words: list[str]) -> None:
    done = CliRunner().invoke(main, ["features", "check", "--platform", "cpu", *words])
    assert done.exit_code in STATUSES, done.output
    assert "MS901" not in done.output
    assert "Traceback" not in done.output


VARIABLES = st.sampled_from(
    ["MINDSPEED_SET", "MINDSPEED_FEATURES", "MINDSPEED_WITHOUT", "MINDSPEED_STRICT", "MINDSPEED_PLATFORM"]
)
TARGETS: dict[str, tuple[int, Callable[[], st.SearchStrategy[Any]], Callable[[Path, Any], object]]] = {
    "job files": (50, job_texts, job),
    "settings": (30, lambda: ASSIGNMENTS, setting),
    "variables": (20, lambda: st.dictionaries(VARIABLES, TEXT, max_size=3), environment),
    "arguments": (20, lambda: st.lists(st.one_of(FLAGS, NAMES, TEXT), max_size=5), arguments),
    "plans": (20, lambda: mutations(plan_data()), lambda folder, data: registry.read_plan(write(folder, "plan.json", data))),
    "locks": (
        20,
        lambda: mutations({"format": 4, "job": "", "plan": plan_data(), "content": {}}),
        lambda folder, data: read_lock(write(folder, "job.lock", data)),
    ),
    "manifests": (
        20,
        lambda: mutations(MANIFEST_DATA),
        lambda folder, data: read_manifest(write(folder, MANIFEST, data).parent),
    ),
    "records": (20, lambda: mutations(RECORD_DATA), lambda folder, data: read_record(write(folder, FILE, data).parent)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("factor", [1, pytest.param(25, marks=pytest.mark.long)])
def test_any_input_ends_with_a_result_or_with_problems(target: str, factor: int, tmp_path: Path) -> None:
    count, inputs, call = TARGETS[target]

    @settings(
        max_examples=count * factor, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(inputs())
    def check(drawn: Any) -> None:
        ends_well(lambda: call(tmp_path, drawn))

    check()


def test_the_numbers_of_inputs_are_those_that_are_promised() -> None:
    assert sum(count for count, _, _ in TARGETS.values()) == 200
