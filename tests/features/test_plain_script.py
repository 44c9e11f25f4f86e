"""What a script can do without mindspeed it can do at the default level: a plain loop over megatron-core's model."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins import MindSpeedError
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.plain_training import GPT2, LLAMA, train
from tests.warm_processes import warm_python

SHAPE: dict[str, Any] = {"world_size": 1, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
WORLD: dict[str, Any] = SHAPE | {
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_linear_unit": True,
    "rotary": True,
    "num_experts": 4,
    "grouped_experts": True,
}
"""A model to which every level-1 feature of one rank applies."""
LEVEL_ONE = {
    "flash-attention",
    "grouped-matmul-add",
    "moe-grouped-gemm",
    "matmul-add",
    "moe-token-permute",
    "rms-norm",
    "rotary-embedding",
    "swiglu",
}
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_ffn_hidden_size": 48}


def plan_of(*requested: str, level: int = 2) -> ActivationPlan:
    """A plan for the world above, where every operator counts as having a variant."""
    layer = Layer("test", requested, world=WORLD, level=level)
    return registry.resolve([layer], made_up("cpu", "0.16.1"))


@pytest.fixture(scope="module")
def default_plan() -> ActivationPlan:
    return plan_of()


def test_the_default_level_switches_on_every_feature_of_one_rank(default_plan: ActivationPlan) -> None:
    names = {feature.name for feature in default_plan.features}
    assert {name for name in names if registry.catalog().feature(name).spec.level == 1} == LEVEL_ONE


CLAMPED = LLAMA | {"activation_func_clamp_value": 0.02}
GELU_WITHOUT_BIAS = GPT2 | {"bias": False}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(LLAMA, id="llama"),
        pytest.param(GPT2, marks=pytest.mark.long, id="gpt2"),
        pytest.param(GELU_WITHOUT_BIAS, marks=pytest.mark.long, id="gelu without bias"),
        pytest.param(CLAMPED, marks=pytest.mark.long, id="clamped"),
    ],
)
def test_a_loop_without_gradient_buffers_trains_as_without_features(
    pool: WorkerPool, default_plan: ActivationPlan, model: dict[str, Any]
) -> None:
    ((losses, problems),) = pool.call(train, 1, model, plan=default_plan)
    ((expected, _),) = pool.call(train, 1, model, plan=plan_of(level=0))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [text for text in problems if text == ROW] == [ROW]


def test_grouped_experts_without_gradient_buffers_train(pool: WorkerPool, default_plan: ActivationPlan) -> None:
    ((losses, problems),) = pool.call(train, 1, LLAMA | MOE, plan=default_plan)
    assert losses[0] > losses[1] > losses[2]
    assert [text for text in problems if text == ROW] == [ROW]


ROW = (
    "MS413 matmul-add: a weight has no fp32, fp16 or bf16 main_grad buffer of Megatron's data parallelism. Training "
    "continues: Megatron adds up the gradient of this weight without fusion"
)


def test_a_requested_feature_is_not_left_out_silently(pool: WorkerPool) -> None:
    with pytest.raises(MindSpeedError) as error:
        pool.call(train, 1, LLAMA, plan=plan_of("matmul-add"))
    assert "MS304 matmul-add: a weight has no fp32, fp16 or bf16 main_grad buffer of Megatron's data parallelism" in str(
        error.value
    )


SCRIPT = """
import torch
from megatron.core import parallel_state
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
from tests.features.plain_training import {model}, train
losses, problems = train({model})
print(losses[0] > losses[1] > losses[2], sum(problem.startswith("MS413 matmul-add") for problem in problems))
"""


@pytest.mark.long
@pytest.mark.parametrize("model", ["LLAMA", "GPT2"])
def test_mindspeed_run_trains_a_plain_script_at_the_default_level(tmp_path: Path, model: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(model=model))
    command = [*warm_python(), "-m", "mindspeed", "run", "--platform", "cpu", "--", str(script)]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": root})
    assert (done.returncode, done.stdout) == (0, "True 1\n"), done.stderr
    assert done.stderr.count("MS413 matmul-add: a weight has no fp32, fp16 or bf16 main_grad") == 1
