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

from tests.features.transformer_engine_layers.client import MODELS
from tests.megatron_lm.checkout import ROOT

HERE: Final = Path(__file__).parent
WANTED: Final = [line for line in (HERE / "clients.txt").read_text("utf-8").splitlines() if "==" in line]
FOLDER: Final = os.environ.get("MINDSPEED_CLIENTS", "")
_FOUND: Final = {canonicalize_name(found.name): found.version for found in distributions(path=[FOLDER])} if FOLDER else {}
MISSING: Final = [line for line in WANTED if _FOUND.get(line.partition("==")[0]) != line.partition("==")[2]]


DENSE: Final = ("llama", "qwen2", "qwen3", "qwen3-moe")
CASES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("mbridge", "one"): DENSE,
    ("mbridge", "tp2"): DENSE,
    ("mbridge", "ep2"): ("qwen3-moe",),
    **{(client, layout): tuple(MODELS) for client in ("megatron-bridge", "mcore-bridge") for layout in ("one", "tp2")},
    **{(client, "ep2"): ("qwen3-moe", "deepseek-v3") for client in ("megatron-bridge", "mcore-bridge")},
}
"""Models by client and layout. mbridge 0.15.1 hands megatron-core 0.16.1 an option of latent attention that it lacks."""
RESULTS: Final = ROOT / "build" / "clients_results"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"MINDSPEED_CLIENTS has not {', '.join(MISSING)}; make test-clients installs them")
@pytest.mark.parametrize(("client", "layout"), CASES)
def test_a_client_loads_trains_and_exports_models(client: str, layout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.client", client, layout, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": FOLDER, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    models = CASES[client, layout]
    done = subprocess.run([*command, *models], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"client"')]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{client} {layout}.json").write_text(json.dumps(rows))
    assert [row["model"] for row in rows] == list(models)
    for row in rows:
        assert "error" not in row, done.stderr[-3000:]
        assert row["difference"] <= 2e-6
        assert row["unequal"] == []
        assert row["losses"][1] < row["losses"][0]
        assert {"TEDotProductAttention", "TERowParallelLinear"} <= set(row["layers"])
