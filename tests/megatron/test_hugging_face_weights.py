"""Weights of Hugging Face in Megatron's models: the same logits on two ranks, and the same weights on the way back.

The packages are those of MINDSPEED_CLIENTS (``make test-clients``), or those that are installed.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from mindspeed.megatron.hugging_face_weights import _name
from tests.megatron_lm.checkout import ROOT

FOLDER = os.environ.get("MINDSPEED_CLIENTS", "")
MISSING = [] if FOLDER else [name for name in ("mbridge", "transformers", "safetensors", "einops") if find_spec(name) is None]
CASES = [
    *(f"{model}:{layout}" for model in ("llama", "qwen3", "qwen3-moe", "deepseek-v3") for layout in ("tp2", "pp2")),
    "qwen3-moe:ep2",
    "deepseek-v3:ep2",
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} are not installed; make test-clients installs them")
@pytest.mark.parametrize("layers", ["local", "engine"])
def test_logits_are_those_of_hugging_face_and_weights_return_unchanged(layers, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron.hugging_face_ranks", str(tmp_path), layers, *CASES]
    path = os.pathsep.join(filter(None, [str(ROOT), FOLDER, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert [row["case"] for row in rows] == CASES
    for row in rows:
        assert "error" not in row, done.stderr[-3000:]
        assert row["difference"] <= 2e-7
        assert (row["weights"] > 0, row["unequal"]) == (True, [])
        folder = tmp_path / row["case"].replace(":", "-")
        (vocabulary,), (weight,) = row["refused"]
        assert vocabulary == (
            f"MS602 the padded vocabulary has 62 rows, but the model in {folder} has vocab_size 64 | --padded-vocab-size 64"
        )
        missing = f"MS602 the weights in {folder / 'less'} have no model.norm.weight, which decoder.final_layernorm.weight of "
        assert weight.startswith(missing)


def test_the_layer_of_a_prediction_has_the_name_that_mbridge_knows():
    def weights_of(name):
        assert name.startswith("mtp.layers.0.transformer_layer.")

    bridge = SimpleNamespace(_weight_name_mapping_mcore_to_hf=weights_of)
    for layer in ("transformer_layer", "mtp_model_layer"):
        name = _name(f"mtp.layers.0.{layer}.mlp.linear_fc2.weight", bridge)
        assert name == "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"
