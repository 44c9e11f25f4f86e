"""A command without features of ours is not refused by a rule that Megatron does not have."""

from dataclasses import replace

import pytest

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from mindspeed.workbench.lint.dry_run import plan_command, read_and_plan_command
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import command_of_words
from mindspeed.workbench.lint.shell_script import Word

MODEL = (
    "--hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --lr 1e-4 "
    "--train-samples 8"
)
MOE = "--num-experts 8 --moe-router-topk 2 --disable-bias-linear"


def plan(words: str, processes: int = 8, platform: str = "cuda", megatron: str = "0.16.1"):
    launch = ["torchrun", "--nproc-per-node", str(processes), "pretrain_gpt.py"]
    return plan_command(command_of_words([*launch, *MODEL.split(), *words.split()]), made_up(platform, megatron))


def messages(words: str, processes: int = 8, platform: str = "cuda", megatron: str = "0.16.1") -> list[str]:
    with pytest.raises(ResolutionError) as caught:
        plan(words, processes, platform, megatron)
    return [problem.message for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("--num-layers 8 --context-parallel-size 2", (8,)),
        (f"--num-layers 8 {MOE} --expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-enable-deepep", (8,)),
        (
            "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            (1, 2, 2, 1),
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (0, 1, 1, 1, 1, 1, 1, 0),
        ),
        ("--num-layers 7 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", (1, 2, 2, 2)),
        (
            "--num-layers 7 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
            "--decoder-last-pipeline-num-layers 4",
            (3, 4),
        ),
        ("--num-layers 15 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|(tt|)*6L", None),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 10 "
            "--microbatch-group-size-per-virtual-pipeline-stage 5",
            (1,) * 8,
        ),
    ],
)
def test_what_megatron_accepts_is_planned(words: str, layers: tuple[int, ...] | None) -> None:
    world = plan(words).world
    assert layers is None or world.layers_per_chunk == layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--num-layers 7 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
            "--account-for-loss-in-pipeline-split",
            "pipeline-parallel: 7 + 1 (output layer) - 1 (first stage) = 7 layers are not divisible by 3 pipeline stages",
        ),
        (
            "--num-layers 14 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3",
            "virtual-pipeline: first_stage_layers=3 and last_stage_layers=3 are not both multiples of vpp=2, the number of "
            "model chunks per stage",
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 10",
            "virtual-pipeline: 5 micro-batches per step are not a multiple of 4 pipeline stages",
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12 "
            "--microbatch-group-size-per-virtual-pipeline-stage 5",
            ("virtual-pipeline: 6 micro-batches per step are not a multiple of the group size 5, which must be at least pp=4"),
        ),
        (
            "--num-layers 8 --context-parallel-size 2 --transformer-impl local",
            (
                "context-parallel needs a feature for context-parallel, because each rank has only a part of the keys, "
                "so attention needs an algorithm such as ring-attention or ulysses-attention"
            ),
        ),
    ],
)
def test_what_megatron_refuses_is_a_problem(words: str, message: str) -> None:
    assert messages(words) == [message]


def test_without_a_transformer_engine_context_parallelism_needs_an_algorithm() -> None:
    (message,) = messages("--num-layers 8 --context-parallel-size 2", platform="cpu")
    assert message.startswith("context-parallel needs a feature for context-parallel")


@pytest.mark.parametrize("value", ["²", "9" * 5000])
def test_a_number_that_is_none_is_a_problem_of_its_option(value: str) -> None:
    assert any(message.startswith("--num-layers is") for message in messages(f"--num-layers {value}"))


@pytest.mark.parametrize("megatron", ["0.17.0", "0.19.0"])
@pytest.mark.parametrize("option", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_the_layers_of_a_hybrid_model_are_those_of_its_pattern_where_megatron_overrides_their_number(
    megatron: str, option: str
) -> None:
    assert plan(f"--num-layers 12 {option} M*M-", megatron=megatron).world.num_layers == 4


def test_a_number_that_contradicts_a_pattern_is_named_with_it() -> None:
    words = ["pretrain_hybrid.py", *MODEL.split(), "--hybrid-layer-pattern", "*E*E", "--num-experts", "4"]
    above = [Layer("command line", world={"moe_layers": 1})]
    with pytest.raises(ResolutionError) as caught:
        read_and_plan_command(command_of_words(words), made_up("cuda", "0.19.0"), (), above)
    (problem,) = caught.value.problems
    assert problem.message == "moe_layers is 1, but the pattern has 2 layers with experts (E)\n    *E*E\n       ^"
    assert problem.fix_text == "remove moe_layers, which the pattern gives"


def test_a_megatron_that_compares_both_refuses_another_number_of_layers_than_the_pattern() -> None:
    (message, *_) = messages("--num-layers 12 --hybrid-override-pattern M*M-")
    assert message.startswith("num_layers is 12, but the pattern has 4 layers")


def test_a_sign_of_equality_alone_is_a_value() -> None:
    assert messages("--num-layers 8 --swiglu =") == ["--swiglu takes no value, but is followed by ="]


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (
            "--window-size 16,0 --reset-attention-mask",
            "flash-attention: layers are Transformer Engine's, but flash-attention supports only Megatron's local layers",
        ),
        (
            "--transformer-impl local --fp8-format e4m3",
            "Megatron's --fp8-format sets 'e4m3', but the layers are local (transformer_impl): local layers ignore it and "
            "compute "
            "without fp8",
        ),
    ],
)
def test_a_rule_of_ours_that_megatron_does_not_share_is_a_warning(words: str, warning: str) -> None:
    command = command_of_words(["python", "pretrain_gpt.py", *MODEL.split(), "--num-layers", "8", *words.split()])
    environment = replace(made_up("cuda", "0.16.1"), engine=True)
    ((checked, _),) = check_jobs([CheckedJob(command, environment)])
    assert isinstance(checked, ActivationPlan)
    assert [row.text for row in checked.rows if (row.kind, row.feature) == ("warning", "mindspeed")] == [warning]
    ours = replace(command, arguments=(*command.arguments, Word("--features", 0), Word("profiler", 0)))
    ((refused, _),) = check_jobs([CheckedJob(ours, environment)])
    assert isinstance(refused, ResolutionError)
    assert warning in [problem.message for problem in refused.problems]


def test_a_rule_that_megatron_shares_refuses_beside_those_that_it_does_not() -> None:
    words = "--num-layers 8 --context-parallel-size 2 --transformer-impl local --reset-attention-mask --fp8-format e4m3"
    command = command_of_words(["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *MODEL.split(), *words.split()])
    ((refused, _),) = check_jobs([CheckedJob(command, replace(made_up("cuda", "0.16.1"), engine=True))])
    assert isinstance(refused, ResolutionError)
    assert [problem.message.partition(",")[0] for problem in refused.problems] == [
        "context-parallel needs a feature for context-parallel"
    ]


def test_the_fix_of_a_missing_feature_is_the_option_of_megatron_that_switches_it_on() -> None:
    with pytest.raises(ResolutionError) as caught:
        plan(f"--num-layers 8 {MOE} --tensor-model-parallel-size 2")
    (problem,) = caught.value.problems
    assert caught.value.words(problem.fix) == "--sequence-parallel"
