"""Frameworks that build Transformer Engine's layers through ``repatch`` or the adaptor, run for real on those in its roles.

MINDSPEED_CLIENTS names a folder with the packages of clients.txt, MINDSPEED_CONSUMERS the checkouts of the frameworks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.features.transformer_engine_layers.test_clients import FOLDER, MISSING, RESULTS

CHECKOUTS: Final = [Path(path).resolve() for path in os.environ.get("MINDSPEED_CONSUMERS", "").split(os.pathsep) if path]
VERSIONS: Final = {
    "verl": ("verl/version/version", "0.8.0.dev"),
    "ms-swift": ("swift/version.py", "4.6.0.dev0"),
    "roll": ("mcore_adapter/pyproject.toml", "0.10.0.dev0"),
}
"""Versions of the frameworks, and the file of a checkout that says which one it is."""
_TOLERANCE: Final = {"verl": 5e-3}
"""verl trains in bf16 alone; the others train in fp32."""
CASES: Final = [
    *((f"verl-{bridge}", model) for bridge in ("mbridge", "megatron-bridge") for model in ("qwen2", "qwen3-moe")),
    *(("ms-swift", model) for model in ("qwen3", "qwen3-moe", "deepseek-v3")),
    *(("roll", model) for model in ("llama", "qwen3", "qwen3-moe")),
]


def checkout_of(framework: str) -> Path:
    """Return the checkout of a framework in the version that was tried; skips the test where there is none."""
    file, version = VERSIONS[framework]
    for root in CHECKOUTS:
        if (root / file).is_file() and version in (root / file).read_text("utf-8"):
            return root
    pytest.skip(f"MINDSPEED_CONSUMERS names no checkout of {framework} {version}")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"MINDSPEED_CLIENTS has not {', '.join(MISSING)}; make test-clients installs them")
@pytest.mark.parametrize(("framework", "model"), CASES)
def test_a_framework_loads_trains_and_exports_a_model(framework: str, model: str, tmp_path: Path) -> None:
    name = framework if framework in VERSIONS else framework.partition("-")[0]
    root = checkout_of(name)
    search = os.pathsep.join([str(root / "mcore_adapter" / "src" if name == "roll" else root), FOLDER])
    settings = {"PYTHONPATH": search, "MINDSPEED_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    settings["MINDSPEED_REPORT"] = str(tmp_path / "report.json")
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.framework", framework, str(tmp_path), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"framework"')]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{framework} {model}.json").write_text(json.dumps(row))
    assert row["difference"] <= _TOLERANCE.get(name, 2e-6)
    assert row["unequal"] == []
    assert row["losses"][2] < row["losses"][1] < row["losses"][0]
    assert {"TEDotProductAttention", "TERowParallelLinear"} <= set(row["layers"])
