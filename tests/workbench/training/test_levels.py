"""What ``mindspeed pretrain`` runs at optimization levels 0 and 1."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.warm_processes import warm_python
from tests.workbench.training.conftest import TINY, Run, losses

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def level_zero(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds in place of Megatron's functions once level 0 is active and a MoE Llama is built."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(ROOT)}
    command = [*warm_python(), "-m", "tests.workbench.training.level_zero", str(tmp_path_factory.mktemp("run"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_at_level_zero_megatrons_own_functions_stand_where_features_put_operators(level_zero: dict[str, Any]) -> None:
    assert level_zero["names"] == []
    assert "megatron.core.transformer.moe.moe_utils:permute" in level_zero["same"]
    assert [site for site, holds in level_zero["same"].items() if not holds] == level_zero["ground"]


def test_at_level_zero_every_module_of_the_model_is_megatrons_or_torchs(level_zero: dict[str, Any]) -> None:
    assert {name.partition(".")[0] for name in level_zero["modules"]} == {"megatron", "torch"}
    assert "megatron.core.transformer.dot_product_attention.DotProductAttention" in level_zero["modules"]
    assert "torch.nn.modules.normalization.RMSNorm" in level_zero["modules"]
    assert level_zero["fused"] is False


@pytest.mark.cover(1, because="the dtype does not know of the layout")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [("--nproc", 1), ("--nproc", 2, "--tp", 2), ("--nproc", 2, "--num-experts", 4)], ids=str)
def test_both_levels_learn_the_same(tmp_path: Path, text: Path, layout: tuple[object, ...], dtype: str) -> None:
    curves = []
    for level in (0, 1):
        run = tmp_path / str(level)
        steps = ("--train-iters", 10, "--optimization-level", level, "--data", text, "--run", run, "--dtype", dtype)
        Run(*TINY, *layout, *steps).done()
        curves.append(losses(run))
        names = [feature["name"] for feature in json.loads((run / "plan.json").read_text())["features"]]
        assert ("flash-attention" in names) == bool(level)
    assert curves[0].keys() == curves[1].keys() == set(range(1, 11))
    assert curves[1][10] < curves[1][1] - 0.1
    for step, loss in curves[0].items():
        assert curves[1][step] == pytest.approx(loss, rel=1e-4 if dtype == "fp32" else 2e-2), step
