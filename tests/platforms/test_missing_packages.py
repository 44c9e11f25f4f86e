"""What a job needs, and neither the platform nor a feature of its plan provides, is a problem."""

import pytest

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up
from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.dry_run import plan_command
from mindspeed.workbench.lint.launched_command import command_of_words

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
)
GROUPED = "--moe-grouped-gemm --transformer-impl local"
LACKING = (
    "{}-platform needs a feature for grouped-experts, because Megatron's local grouped experts need the package grouped_gemm, "
    "whose kernels need CUDA"
)
SHARED = "--use-distributed-optimizer --use-precision-aware-optimizer"


def plan(platform: str, words: str, megatron: str = "0.16.1") -> ActivationPlan:
    launch = ["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py"]
    return plan_command(command_of_words([*launch, *MODEL.split(), *words.split()]), made_up(platform, megatron))


def problems(platform: str, words: str, megatron: str = "0.16.1") -> list[tuple[str, str]]:
    try:
        plan(platform, words, megatron)
    except ResolutionError as error:
        return [(problem.message, error.words(problem.fix)) for problem in error.problems]
    return []


@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_grouped_experts_have_their_feature_beside_recomputed_activations(platform: str) -> None:
    assert "moe-grouped-gemm" in plan(platform, GROUPED).names
    assert "moe-grouped-gemm" in plan(platform, f"{GROUPED} --recompute-activation-function").names


def test_grouped_experts_without_the_level_of_their_feature_are_refused() -> None:
    fix = "remove --moe-grouped-gemm, or add moe-grouped-gemm to the features"
    assert problems("npu", f"{GROUPED} --optimization-level 0") == [(LACKING.format("npu"), fix)]


@pytest.mark.parametrize(
    ("platform", "words", "megatron"),
    [
        ("cuda", f"{GROUPED} --recompute-activation-function", "0.16.1"),
        ("npu", f"{GROUPED} --recompute-activation-function", "0.17.1"),
        ("npu", "--moe-grouped-gemm --transformer-impl transformer_engine", "0.16.1"),
    ],
)
def test_grouped_experts_that_megatron_can_build_are_accepted(platform: str, words: str, megatron: str) -> None:
    assert LACKING.format(platform) not in [message for message, _ in problems(platform, words, megatron)]


@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_the_optimizer_of_transformer_engine_is_refused_where_none_is_installed(platform: str) -> None:
    text = "the precision-aware optimizer needs FusedAdam of Transformer Engine, which is not installed"
    found = problems(platform, SHARED)
    assert found == [(f"{platform}-platform: {text}", "remove --use-precision-aware-optimizer")]
    assert problems(platform, f"{SHARED} --optimizer-cpu-offload") == []
    assert problems("cuda", SHARED) == []
