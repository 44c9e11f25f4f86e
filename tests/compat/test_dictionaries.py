"""Dictionaries of frameworks on top: they plan what they ask for, assume nothing, and train as with our names."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mindspeed import registry
from mindspeed.compat.activation import repatch
from mindspeed.engine.runtime import session
from tests.compat.dictionaries import ENGINE, TRAINER, UNREAD
from tests.warm_processes import warm_python

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ALGORITHM = "context_parallel_algo is not given: megatron_cp_algo, MindSpeed's default, maps to ring-attention"


@pytest.fixture
def of_a_framework(monkeypatch):
    """A process whose command line is not Megatron-LM's, with the plan that importing the adaptor makes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    from mindspeed.megatron_adaptor import adapt  # adapts at once when it is imported first

    adapt(["train.py", "--model", "some-model"])


def notes():
    return [row.text for row in session.current().plan.rows if row.kind == "note"]


@pytest.mark.parametrize("given", [ENGINE, TRAINER], ids=["engine", "trainer"])
def test_nothing_is_assumed_of_a_model_that_nobody_described(of_a_framework, given):
    repatch(given)
    plan = session.current().plan
    assert not {"num_experts", "normalization", "rotary", "gated_linear_unit", "activation"} & plan.world.known().keys()
    assert plan.world.knows("dtype") is False


@pytest.mark.parametrize("given", [ENGINE, TRAINER], ids=["engine", "trainer"])
def test_specs_of_transformer_engine_can_be_built_unless_layers_are_local(of_a_framework, given):
    repatch(given)
    assert "transformer-engine-layers" in session.current().plan.names
    repatch({"transformer_impl": "local"})
    assert "transformer-engine-layers" not in session.current().plan.names
    assert not session.current().plan.world.is_set("engine_over_local")


@pytest.mark.parametrize("given", [ENGINE, TRAINER], ids=["engine", "trainer"])
def test_context_parallelism_without_an_algorithm_takes_mindspeeds_default_with_a_row(of_a_framework, given):
    repatch(given | {"context_parallel_size": 2})
    assert {"context-parallel", "ring-attention"} <= set(session.current().plan.names)
    assert DEFAULT_ALGORITHM in notes()
    assert not any("--context-parallel-algo" in text for text in notes())


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"context_parallel_algo": "ulysses_cp_algo"}, "ulysses-attention"),
        ({"cp_comm_type": "a2a"}, "ulysses-attention"),
        ({"cp_comm_type": ["all_gather"]}, "kv-allgather-cp"),
    ],
)
def test_an_algorithm_that_is_given_is_taken(of_a_framework, given, feature):
    repatch(ENGINE | {"context_parallel_size": 2} | given)
    assert feature in session.current().plan.names
    assert DEFAULT_ALGORITHM not in notes()


def test_an_algorithm_of_the_plan_before_stays(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    registry.activate(registry.plan(features=["ulysses-attention"], world={"cp": 2, "num_attention_heads": 4}))
    repatch(ENGINE | {"context_parallel_size": 2})
    assert "ulysses-attention" in session.current().plan.names
    assert "ring-attention" not in session.current().plan.names


def test_experts_that_nobody_counted_are_not_checked(of_a_framework):
    repatch(TRAINER | {"expert_model_parallel_size": 2})
    plan = session.current().plan
    assert "expert-parallel" in plan.names
    unchecked = [row.line() for row in plan.rows if row.kind == "not-checked" and row.feature == "expert-parallel"]
    assert any("num_experts; give --num-experts" in text for text in unchecked)


def test_arguments_that_nobody_reads_are_one_line_with_a_count(of_a_framework, capsys):
    capsys.readouterr()
    repatch(TRAINER)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "reads" in line]
    begin = f"mindspeed: compat: no feature reads {UNREAD} of the arguments, and Megatron has none of them: num_train_epochs, "
    assert line.startswith(begin)
    assert line.endswith(f" and {UNREAD - 8} more")


TRAINED = """
import hashlib, json, os, sys

run, layout = json.loads(sys.argv[1]), json.loads(sys.argv[2])
shape = sys.argv[3]
sys.argv[1:] = []
if "arguments" in run:
    from mindspeed.megatron_adaptor import repatch

    repatch(run["arguments"])
else:
    from mindspeed import registry

    registry.activate(registry.plan(**run))
import torch.distributed as dist
from mindspeed.engine.runtime import session

dist.init_process_group("gloo")
from megatron.core import parallel_state

parallel_state.initialize_model_parallel(**layout)
from mindspeed.workbench.verification.shape import SHAPES, Recipe
from mindspeed.workbench.verification.training import train

result = train(Recipe(next(known for known in SHAPES if known.name == shape), steps=2))
digest = hashlib.sha256(repr(sorted(result.losses.items())).encode())
for piece in sorted(result.pieces, key=lambda piece: (piece.kind, piece.name, str(piece.index))):
    digest.update(f"{piece.kind} {piece.name} {piece.index}".encode() + piece.values.tobytes())
line = f"rank {dist.get_rank()} {len(result.pieces)} {digest.hexdigest()} {' '.join(session.current().plan.names)}"
os.write(1, f"{line}\\n".encode())  # at once: the ranks write into one pipe
dist.barrier()
"""


def trained(folder, run, layout, shape):
    """The hash of losses, gradients and weights of each of two ranks, and the features that were active."""
    (folder / "script.py").write_text(TRAINED)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MINDSPEED_PLATFORM": "cpu",
        "MINDSPEED_REPORT": "",
        "MINDSPEED_OPS": "reference",
    }
    command = [*warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    words = [json.dumps(run), json.dumps(layout), shape]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=env, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "features", "world", "layout", "shape"),
    [
        (ENGINE, ["data-parallel"], {}, {}, "llama"),
        (
            ENGINE | {"context_parallel_size": 2},
            ["ring-attention"],
            {"cp": 2},
            {"context_parallel_size": 2},
            "llama",
        ),
        (
            TRAINER | {"expert_model_parallel_size": 2, "calculate_per_token_loss": False},
            ["expert-parallel", "distributed-optimizer", "recompute"],
            {"ep": 2},
            {"expert_model_parallel_size": 2},
            "moe",
        ),
    ],
    ids=["dense", "cp 2", "ep 2"],
)
def test_a_dictionary_trains_bit_for_bit_as_the_same_features_by_our_names(tmp_path, given, features, world, layout, shape):
    settings = {"recompute": {"granularity": "selective", "modules": ["core_attn"]}} if "recompute" in features else {}
    ours = {"features": features, "settings": settings, "world": {"world_size": 2, **world}}
    theirs = {"arguments": given | {"transformer_impl": "local"}}  # the layers that the script builds
    assert trained(tmp_path, theirs, layout, shape) == trained(tmp_path, ours, layout, shape)
