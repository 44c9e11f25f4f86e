"""examples/pretrain_gpt_distributed.sh: what it starts, and that it trains."""

import os
import shlex
import subprocess
from dataclasses import replace

import pytest

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.given_arguments import unknown_options
from mindspeed.megatron_lm.training_plan import plan_training
from mindspeed.megatron_lm.training_request import OWN_FLAGS
from tests.megatron_lm import stub
from tests.megatron_lm.checkout import ROOT

SCRIPT = ROOT / "examples" / "pretrain_gpt_distributed.sh"
SMALL = {"LAYERS": "4", "HIDDEN": "32", "FFN": "96", "HEADS": "4", "QUERY_GROUPS": "2", "SEQ_LENGTH": "32", "VOCAB": "127"}


@pytest.fixture
def command(monkeypatch):
    """The words that the script would start: ``command(TP="2")``."""

    def show(*words, **variables):
        environment = {"PATH": os.environ["PATH"], "MEGATRON_LM_PATH": "/checkout", "PYTHON": "echo", **variables}
        done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout)

    return show


def test_the_script_is_valid_and_says_what_it_lacks():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("MEGATRON_LM_PATH: name a checkout of Megatron-LM (tag core_v0.16.1)")
    lacking = {"PATH": os.environ["PATH"], "MEGATRON_LM_PATH": "/checkout", "DATA_PATH": "/data"}
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False, env=lacking)
    assert done.stderr.rstrip().endswith("TOKENIZER: name the tokenizer that DATA_PATH was made with")


@pytest.mark.parametrize("version", ["0.15.3", "0.16.1"])
def test_every_flag_of_the_script_is_megatrons_or_ours(command, version):
    words = command(TP="2", VPP="2", PP="2", EXPERTS="8", EP="2", SAVE="out", LOAD="out", DATA_PATH="/d", TOKENIZER="/t")
    flags = words[words.index("/checkout/pretrain_gpt.py") + 1 :]
    assert set(unknown_options(flags, surface(version))) == {"--optimization-level", "--features"}
    assert {"--optimization-level", "--features"} <= OWN_FLAGS.keys()


def test_its_layout_is_the_features_of_the_plan(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub.build(tmp_path)))
    words = command("--recompute-activations", NPROC="4", TP="2", **SMALL)
    start = words.index("/checkout/pretrain_gpt.py")
    assert words[:start] == shlex.split("-m mindspeed run --nproc 4 --")
    plan = plan_training(words[start + 1 :], {}, replace(made_up("cpu", "0.16.1"), world_size=4))[1]
    assert {feature.name for feature in plan.features if feature.level != 1 or feature.name in ("rms-norm", "swiglu")} == {
        "tensor-parallel",
        "sequence-parallel",
        "data-parallel",
        "distributed-optimizer",
        "async-ddp",
        "async-param-gather",
        "rms-norm",
        "swiglu",
        "recompute",
        "transformer-engine-layers",
    }
    nodes = command(NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert nodes[3:13] == shlex.split("--nproc 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --")[:10]


@pytest.mark.long
def test_it_trains(checkout):
    variables = {
        **SMALL,
        "MEGATRON_LM_PATH": str(checkout.root),
        "NPROC": "2",
        "TP": "2",
        "ITERATIONS": "3",
        "GLOBAL_BATCH": "4",
    }
    saved = checkout.folder / "saved"
    run = checkout.run(["bash", str(SCRIPT)], {**variables, "SAVE": str(saved)}, also=False).ended_well()
    assert list(run.steps) == [1, 2, 3]
    assert {one["name"] for one in run.report["features"]} >= {"tensor-parallel", "sequence-parallel", "rms-norm", "swiglu"}
    assert run.report["problems"] == []
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "3"
