"""The rows of tables that run by default, and what is left to ``--exhaustive``."""

import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.covers import facts, kept_rows

GRID = [
    {"world": w, "mask": m, "dtype": d} for w, m, d in product((1, 2, 3, 4), ("causal", "window"), ("fp32", "bf16", "fp64"))
]


def kept(rows: list[dict[str, Any]], *strength: int, given: tuple[int, ...] = (), **keywords: Any) -> list[dict[str, Any]]:
    mark: pytest.Mark = getattr(pytest.mark.cover(*strength, **keywords), "mark")  # noqa: B009
    return [rows[number] for number in sorted(kept_rows(mark, rows, given))]


def test_every_two_values_of_a_grid_meet_in_few_rows() -> None:
    rows = kept(GRID)
    assert len(rows) == 12
    for one, other in combinations(("world", "mask", "dtype"), 2):
        assert {(row[one], row[other]) for row in rows} == {(row[one], row[other]) for row in GRID}


def test_with_strength_1_every_value_occurs() -> None:
    rows = kept(GRID, 1)
    assert len(rows) == 4
    for name in ("world", "mask", "dtype"):
        assert {row[name] for row in rows} == {row[name] for row in GRID}


def test_rows_of_the_default_run_stay_and_count() -> None:
    small = tuple(number for number, row in enumerate(GRID) if row["world"] <= 2)
    rows = kept(GRID, 1, given=small)
    assert [row for row in rows if row["world"] <= 2] == [GRID[number] for number in small]
    assert len(rows) == len(small) + 2


def test_facts_are_values_with_their_names_however_deep() -> None:
    @dataclass(frozen=True)
    class Row:
        id: str
        features: tuple[str, ...]
        settings: dict[str, dict[str, int]]
        flags: str = ""

    row = Row("a name", ("ring-attention", "recompute"), {"ring-attention": {"window": 2}}, "--tp 2 --bf16")
    assert facts({"row": row}) == {
        ("row", "features", "ring-attention"),
        ("row", "features", "recompute"),
        ("row", "settings", "ring-attention", "window", "2"),
        ("row", "flags", "--tp 2"),
        ("row", "flags", "--bf16"),
    }


FILE = """
import pytest

@pytest.mark.long
@pytest.mark.cover(1, because="sizes and kinds do not meet")
@pytest.mark.parametrize("kind", ["a", "b"])
@pytest.mark.parametrize("size", [1, 2])
def test_one(size, kind):
    pass

@pytest.mark.long
@pytest.mark.exhaustive("test_one has it")
def test_other():
    pass
"""


def test_what_is_left_is_listed_with_its_reason_and_runs_with_exhaustive(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "from tests import covers\n"
        "pytest_addoption = covers.add_options\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(covers.Covers())\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-q", "-m", "long"]

    def run(*more: str) -> str:
        return subprocess.run([*command, str(tmp_path), *more], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    assert "5 passed" in run("--exhaustive")
    listed = run("--collect-only")
    assert "3 tests are left to --exhaustive" in listed
    assert "2 of 4  test_file.py::test_one: sizes and kinds do not meet" in listed.replace(f"{tmp_path.name}/", "")
    assert "1 of 1  test_file.py::test_other: test_one has it" in listed.replace(f"{tmp_path.name}/", "")
