"""Packages that build Transformer Engine's layers, run for real on those in its roles.

MINDSPEED_CLIENTS names a folder with the packages of clients.txt; ``make test-clients`` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

import pytest
from packaging.utils import canonicalize_name

from tests.features.transformer_engine_layers.client import CLIENTS, MODELS

HERE: Final = Path(__file__).parent
WANTED: Final = [line for line in (HERE / "clients.txt").read_text("utf-8").splitlines() if "==" in line]
FOLDER: Final = os.environ.get("MINDSPEED_CLIENTS", "")
_FOUND: Final = {canonicalize_name(found.name): found.version for found in distributions(path=[FOLDER])} if FOLDER else {}
MISSING: Final = [line for line in WANTED if _FOUND.get(line.partition("==")[0]) != line.partition("==")[2]]


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"MINDSPEED_CLIENTS has not {', '.join(MISSING)}; make test-clients installs them")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_loads_trains_and_exports_a_model(client: str, model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.client", client, model, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": FOLDER, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] <= 2e-6
    assert found["unequal"] == []
    assert found["losses"][1] < found["losses"][0]
    assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= set(found["layers"])
