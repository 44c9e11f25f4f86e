"""Megatron's rules judge a command as its plan changes it, on every platform, and its job is what the ranks will see."""

import json
from collections.abc import Callable
from shlex import split

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.job.fields import PLATFORMS
from tests.megatron_lm.upstream.checkouts import ARGUMENTS, make

PARSER = """
    for name in ("num-attention-heads", "seq-length", "max-position-embeddings", "encoder-seq-length", "micro-batch-size",
                 "context-parallel-size", "pipeline-model-parallel-size", "expert-model-parallel-size", "num-experts",
                 "global-batch-size", "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("overlap-param-gather", "overlap-grad-reduce", "use-distributed-optimizer", "sequence-parallel",
                 "use-torch-fsdp2", "use-megatron-fsdp"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--pipeline-model-parallel-layout")
    return parser.parse_known_args()[0]
"""
RULES = """
    import os
    if args.seq_length is None:
        args.seq_length = args.encoder_seq_length
    assert args.max_position_embeddings >= args.seq_length, "positions are too few"
    if args.overlap_param_gather:
        assert args.overlap_grad_reduce, "gathers with reductions alone"
    if args.context_parallel_size and args.context_parallel_size > 1:
        assert args.encoder_seq_length or args.seq_length % (2 * args.context_parallel_size) == 0, "zig-zag does not divide"
    if args.tensor_model_parallel_size > 1:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "one queue"
    if args.deterministic_mode:
        assert os.environ.get("NCCL_ALGO") == "Ring", "one order of sums"
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    if args.micro_batch_size == 3:
        args.micro_batch_size = 4
    if args.num_layers == 6:
        args.num_layers = torch.cuda.device_count() + 1
"""
TEXT = ARGUMENTS.replace("\n    return parser.parse_known_args()[0]\n", PARSER).replace(
    "    while args.loops:\n        pass\n    args.deterministic = helper(args)\n", RULES
)
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--save-interval 1 --eval-interval 1"
)
"""A model that the rules of the made-up Megatron accept."""

Checking = Callable[..., list[str]]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Checking:
    """Return the messages of the problems of a command: ``problems("npu", "--fp16 --bf16")``."""
    folder = make(tmp_path_factory.mktemp("megatron"), TEXT)

    def check(platform: str, words: str, processes: int = 2, form: str = "--json") -> list[str]:
        launch = ["torchrun", "--nproc-per-node", str(processes), str(folder / "pretrain_gpt.py"), *split(MODEL)]
        options = ["check", *split(form), "--platform", platform]
        result = CliRunner().invoke(main, [*options, "--", *launch, *split(words)], catch_exceptions=False)
        if form != "--json":
            return [result.output] * result.exit_code
        found = json.loads(result.stdout)["problems"]
        return [problem["message"].removeprefix("Megatron-LM 0.16.1 refuses this command: ") for problem in found]

    return check


@pytest.mark.budget(20)
@pytest.mark.parametrize("flag", ["", "--features profiler"], ids=["stock", "with a flag of ours"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_the_rules_refuse_is_a_problem_on_every_platform(problems: Checking, platform: str, flag: str) -> None:
    assert problems(platform, flag) == []
    assert problems(platform, f"--fp16 --bf16 {flag}") == ["not args.fp16"]
    assert problems(platform, f"--max-position-embeddings 32 {flag}") == ["positions are too few"]


@pytest.mark.budget(20)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("form", ["--format text", "--format github", "--format sarif"])
def test_a_refusal_is_in_every_format(problems: Checking, platform: str, form: str) -> None:
    (output,) = problems(platform, "--fp16 --bf16", form=form)
    assert "Megatron-LM 0.16.1 refuses this command: not args.fp16" in output
    assert problems(platform, "", form=form) == []


@pytest.mark.budget(20)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_trap_is_told_on_every_platform_but_those_of_cuda(problems: Checking, platform: str) -> None:
    groups = "--group-query-attention --num-query-groups 3"
    assert any("not divisible by --num-query-groups" in message for message in problems(platform, groups))


@pytest.mark.budget(20)
@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_what_a_feature_brings_along_is_accepted(problems: Checking, platform: str) -> None:
    assert problems(platform, "--overlap-param-gather") == []
    assert problems(platform, "--tensor-model-parallel-size 2") == [], "the rank sets CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.budget(20)
def test_on_cuda_a_command_of_megatron_alone_is_judged_as_it_stands(problems: Checking) -> None:
    assert problems("cuda", "--overlap-param-gather") == ["gathers with reductions alone"]
    assert problems("cuda", "--overlap-param-gather --features profiler") == []


@pytest.mark.budget(20)
def test_a_feature_that_accepts_more_than_the_validation_does_so_here(problems: Checking) -> None:
    assert problems("npu", "--context-parallel-size 2 --seq-length 62 --features ulysses-attention") == []


@pytest.mark.budget(20)
def test_variables_that_a_launcher_sets_for_a_feature_are_set(problems: Checking) -> None:
    assert "one order of sums" not in problems("npu", "--features deterministic")


@pytest.mark.budget(20)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_value_that_megatron_switches_off_is_off_in_the_plan(problems: Checking, platform: str) -> None:
    assert problems(platform, "--sequence-parallel") == []
    assert problems(platform, "--sequence-parallel --features profiler") == []


@pytest.mark.budget(20)
def test_a_value_that_megatron_makes_another_one_is_the_problem_of_the_rank(problems: Checking) -> None:
    (message,) = problems("npu", "--micro-batch-size 3")
    assert message == "the plan was made for micro_batch_size=3, but Megatron's argument micro_batch_size gives 4"


@pytest.mark.budget(20)
def test_a_value_that_only_a_device_decides_is_not_compared(problems: Checking) -> None:
    assert problems("npu", "--num-layers 6") == []
