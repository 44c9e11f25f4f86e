"""Benchmarks run: their imports, the names in their texts, and those of the framework once at the smallest size."""

import importlib
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import apply, cli, compare, discovery, kernels, patching, resolver
from benchmarks.table import Row, Spent, machine, medians, report, smallest, timed
from tests.conftest import ROOT

FILES = sorted(
    file for file in (ROOT / "benchmarks").rglob("*.py") if file.name != "__main__.py" and "accelerator" not in file.parts
)
"""Without those that import Triton."""
_NAME = re.compile(
    r'"((?:mindspeed|benchmarks|tests|megatron)\.\w+\.\w+(?:\.\w+)*)(?::[\w.]+)?"'
)  # mindspeed.npu_gmm is an operator


def dead_names(text: str) -> list[str]:
    """The dotted names of modules in string constants that lead nowhere."""
    return [name for name in dict.fromkeys(_NAME.findall(text)) if not is_module(name)]


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_imports_and_names_no_dead_module(file: Path) -> None:
    importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    assert dead_names(file.read_text(encoding="utf-8")) == []


def test_a_dead_module_name_is_found() -> None:
    assert dead_names('LOADED = ("megatron.core.optimizer", "mindspeed.engine.nowhere", "benchmarks.operators.moe:rows")') == [
        "mindspeed.engine.nowhere"
    ]


@pytest.mark.parametrize(
    "benchmark",
    [resolver, patching, pytest.param(apply, marks=pytest.mark.long), discovery, cli],
    ids=lambda module: module.__name__,
)
def test_a_benchmark_of_the_framework_runs_once_at_its_smallest_size(benchmark: object) -> None:
    with smallest():
        rows = benchmark.rows()  # type: ignore[attr-defined]
    assert rows
    assert all(row.command == benchmark.COMMAND for row in rows)  # type: ignore[attr-defined]
    assert all(row.wall is None or (row.measured > 0 and row.wall > 0) for row in rows)


def test_the_benchmark_of_kernels_runs_once_at_its_smallest_size() -> None:
    threads = torch.get_num_threads()
    try:
        with smallest():
            rows = kernels.rows()
    finally:
        torch.set_num_threads(threads)
    assert [row.what for row in rows[:2]] == [
        "rms_norm f+b, 1 MiB bfloat16, one thread: share of copy_",
        "swiglu f+b, 1 MiB bfloat16, one thread: share of copy_",
    ]
    assert all(row.measured > 0 for row in rows)


def test_a_benchmark_that_names_a_dead_module_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "LOADED", (*patching.LOADED, "megatron.core.nowhere"))
    with smallest(), pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.nowhere"):
        patching.rows()


def test_times_are_cpu_seconds_with_the_clock_beside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (spent,) = medians(lambda: sum(range(1000)), repeat=3)
    assert 0 < spent.cpu < 1
    assert report([timed("a sum", 5, Spent(0.0012, 0.0034), "ms", "a command")], tmp_path / "rows.json") == 0
    assert "ok   a sum  1.2 ms (3.4 on the clock)  (target 5 ms)  a command" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["wall"] == 3.4


def test_an_unknown_benchmark_starts_none() -> None:
    said = CliRunner().invoke(command.main, ["resolvr"], prog_name="python -m benchmarks")
    assert (said.exit_code, said.output.partition("Error: ")[2][:40]) == (2, "there is no benchmark resolvr; there are")


def test_the_table_of_the_page_is_made_from_the_results() -> None:
    text = command.README.read_text(encoding="utf-8")
    assert command.page(text) == text, "python -m benchmarks page"


def test_a_row_keeps_a_result_for_each_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this processor measured before is replaced, also a row that its command no longer makes."""
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    other = {
        "what": "a",
        "target": 3.0,
        "measured": 5.0,
        "unit": "ms",
        "command": "c",
        "machine": "4 cores of another, Python 3",
    }
    here = {**other, "measured": 4.0, "machine": f"{machine().partition(',')[0]}, Python 2"}
    command.RESULTS.write_text(
        json.dumps({"rows": [other, here, here | {"what": "gone"}, here | {"what": "b", "command": "d"}]})
    )
    command.keep([Row("a", 3, 2, "ms", "c"), Row("e", 1, 2, "ms", "c")])
    kept = json.loads(command.RESULTS.read_text())["rows"]
    assert [(row["what"], row["measured"]) for row in kept] == [("a", 5.0), ("a", 2), ("b", 4.0), ("e", 2)]
    processor = machine().partition(",")[0]
    assert command.page("").splitlines()[3:] == [
        f"| what | target | 4 cores of another | {processor} | command |",
        "| --- | --- | --- | --- | --- |",
        "| a | 3 ms | 5 ms, missed | 2 ms | `c` |",
        "| b | 3 ms | not measured | 4 ms, missed | `d` |",
        "| e | 1 ms | not measured | 2 ms, missed | `c` |",
        "",
        "<!-- end -->",
    ]


OLD, NEW = Path("old"), Path("new")


def compared(monkeypatch: pytest.MonkeyPatch, old: dict[str, float], *turns: dict[str, float]) -> int:
    """The exit status where the old checkout always takes this long, and the new one so long in each turn."""
    times = iter(turns)
    monkeypatch.setattr(compare, "measure", lambda name, checkout: old if checkout == OLD else next(times))
    return compare.compare(OLD, NEW, ("resolver",))


def test_a_row_that_is_slower_in_every_turn_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(monkeypatch, {"a": 10.0, "b": 5.0}, *[{"a": 12.6, "b": 5.0}] * compare.ROUNDS) == 1
    assert set(capsys.readouterr().out.splitlines()) == {
        "SLOWER a: 10 -> 12.6, ratio 1.26",
        "ok     b: 5 -> 5, ratio 1.00",
    }


def test_a_row_that_was_slow_once_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, {"a": 10.0}, {"a": 15.0}, {"a": 10.5}) == 0


def test_a_benchmark_that_no_longer_runs_fails_and_one_that_never_ran_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, {"a": 10.0}, {}) == 1
    assert compared(monkeypatch, {}, {"a": 10.0}) == 0
    assert capsys.readouterr().out.splitlines() == [
        "FAILED benchmarks/resolver.py does not run with new",
        "not compared: benchmarks/resolver.py does not run with old",
    ]


@pytest.mark.long
def test_a_planted_slow_resolver_fails_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "mindspeed", tmp_path / "mindspeed", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "mindspeed" / "engine" / "resolution" / "resolver.py"
    source = file.read_text(encoding="utf-8")
    order = "def _order(state: ResolutionState) -> list[str]:\n"
    assert source.count(order) == 1
    file.write_text(source.replace(order, f"{order}    list(_declared_order(state)) * 40\n    sum(range(1_000_000))\n"))
    assert compare.compare(ROOT, tmp_path, ("resolver",)) == 1
    assert "SLOWER resolve 60 features: " in capsys.readouterr().out
    assert compare.compare(ROOT, ROOT, ("resolver",)) == 0
