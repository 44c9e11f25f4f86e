"""A plain script under the newest Python and Megatron that were tested: level 1, two processes, and the way back."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mindspeed.registry import catalog
from tests.megatron.versions.conftest import Megatron, unpacked
from tests.pythons.conftest import ROOT, VARIABLE, Interpreter, interpreters

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PYTHON, MEGATRON = "3.12", "0.19.0"
LEVEL_ONE = {name for name, spec in catalog(frozenset()).specs.items() if spec.level == 1}
MEGATRONS_OWN = {"megatron.core.utils: ['_te_version']"}
"""What Megatron itself remembers from the first question for the version of Transformer Engine."""


@pytest.fixture(scope="module")
def python() -> Interpreter:
    if PYTHON not in interpreters():
        pytest.skip(f"no Python {PYTHON} in {VARIABLE}")
    return interpreters()[PYTHON]


@pytest.fixture(scope="module")
def megatron() -> Megatron:
    found = {one.version: one for one in unpacked()}
    if MEGATRON not in found:
        pytest.skip(f"no checkout {MEGATRON} in MINDSPEED_MEGATRONS")
    return found[MEGATRON]


def ranks(python: Interpreter, megatron: Megatron, kind: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """Run a kind of `tests.pythons.level_one` in processes as a launcher starts them; return what each rank wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = os.pathsep.join([str(ROOT), str(megatron.folder)])
    shared = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": port}
    files = [folder / f"{kind}{rank}.json" for rank in range(size)]
    processes = [
        subprocess.Popen(
            [str(python.program), "-m", "tests.pythons.level_one", kind, str(file)],
            env={**os.environ, **shared, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stderr=(folder / f"{kind}{rank}.log").open("w"),
        )
        for rank, file in enumerate(files)
    ]
    ended = [process.wait() for process in processes]
    assert ended == [0] * size, (folder / f"{kind}{size - 1}.log").read_text()[-4000:]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.fixture(scope="module")
def stock(python: Interpreter, megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks(python, megatron, "stock", 1, tmp_path_factory.mktemp("stock"))[0]


@pytest.mark.parametrize(("kind", "size"), [("one", 1), ("two", 2)])
def test_level_one_trains_as_stock_and_is_undone(
    python: Interpreter, megatron: Megatron, stock: dict[str, Any], tmp_path: Path, kind: str, size: int
) -> None:
    expected = LEVEL_ONE - ({"ring-attention-update"} if kind == "one" else set())
    for answer in ranks(python, megatron, kind, size, tmp_path):
        assert answer["python"].startswith(f"{PYTHON}.")
        assert set(answer["features"]) == expected
        assert set(answer["reached"]) == expected
        assert set(answer["undone"]) <= MEGATRONS_OWN
        assert answer["left"] == []
        assert answer["losses"] + answer["norms"] == pytest.approx(stock["losses"] + stock["norms"], rel=1e-5)
