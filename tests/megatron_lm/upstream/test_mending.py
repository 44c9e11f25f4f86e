"""Every fix of what Megatron's rules refuse names options that a user can type, and mends the problem."""

import os
from collections.abc import Iterator
from pathlib import Path
from shlex import split

import pytest

from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.problems import Fix, Problem
from mindspeed.workbench.lint.upstream.derived_names import derived_names
from mindspeed.workbench.lint.upstream.mending import NEEDED, with_fix
from mindspeed.workbench.lint.upstream.process import Checkout, find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tests.megatron_lm.checkout import VARIABLE
from tests.megatron_lm.upstream.checkouts import ARGUMENTS, make

PARSER = """
    for name in ("micro-batch-size", "pipeline-model-parallel-size", "num-experts", "groups", "stages"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("overlaps", "shards", "mocks"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--train-data-path", nargs="*")
    parser.add_argument("--ckpt-format", default="torch_dist", choices=["torch", "torch_dist"])
    parser.add_argument("--moe-aux-loss-coeff", type=float, nargs="+", default=0.0)
    parser.add_argument("--moe-router-load-balancing-type", nargs="+", default="aux_loss")
    parser.add_argument("--decoder-first-pipeline-num-layers", type=int)
    parser.add_argument("--account-for-embedding-in-pipeline-split", action="store_true")
    parser.add_argument("--account-for-loss-in-pipeline-split", action="store_true")
    parser.add_argument("--use-torch-fsdp2", action="store_true")
    parser.add_argument("--overlap-param-gather-with-optimizer-step", action="store_true")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    parser.add_argument("--moe-router-num-groups", type=int)
    parser.add_argument("--mock-data", action="store_true")
    return parser"""
RULES = """
    import os
    args.use_dist_ckpt = args.ckpt_format != "torch"
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None
    if args.overlap_param_gather_with_optimizer_step:
        assert args.virtual_pipeline_model_parallel_size is not None, "interleaved stages alone"
        assert not args.use_dist_ckpt, "no distributed checkpoints"
    assert args.mock_data + bool(args.data_path) + bool(args.train_data_path) <= 1, "one source"
    if isinstance(args.moe_router_load_balancing_type, list) and len(args.moe_router_load_balancing_type) > 1:
        assert isinstance(args.moe_aux_loss_coeff, list) and (
            len(args.moe_aux_loss_coeff) == len(args.moe_router_load_balancing_type)), "one coefficient for each"
    if args.use_torch_fsdp2:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1", "several queues"
    elif args.tensor_model_parallel_size > 1:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "one queue"
    config = make_config(args)
"""
FUNCTIONS = """
class Config:
    pass

def make_config(args):
    kw_args = {}
    kw_args['num_moe_experts'] = args.num_experts
    kw_args['num_layers_in_first_pipeline_stage'] = args.decoder_first_pipeline_num_layers
    made = Config()
    vars(made).update(vars(args))
    vars(made).update(kw_args)
    validate_config(made)

def validate_config(self):
    if self.moe_router_num_groups is not None:
        assert self.num_moe_experts % self.moe_router_num_groups == 0, "groups of other sizes"
    if self.num_layers_in_first_pipeline_stage is not None and (
        self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
    ):
        raise ValueError("two ways of splitting")
    if self.pipeline_model_parallel_size:
        if self.num_layers % self.pipeline_model_parallel_size:
            raise ValueError("layers do not divide")
"""
MADE_UP = {
    "--num-experts 8 --moe-router-num-groups 3": "--num-experts N (a multiple of 3)",
    "--overlap-param-gather-with-optimizer-step --ckpt-format torch": (
        "--num-virtual-stages-per-pipeline-rank 2, or remove --overlap-param-gather-with-optimizer-step"
    ),
    "--overlap-param-gather-with-optimizer-step --num-virtual-stages-per-pipeline-rank 2": (
        "--ckpt-format torch, or remove --overlap-param-gather-with-optimizer-step"
    ),
    "--mock-data --data-path a": "remove --mock-data or --data-path",
    "--mock-data --data-path a --train-data-path b": (
        "remove --mock-data and --train-data-path, or remove --mock-data and --data-path, "
        "or remove --train-data-path and --data-path"
    ),
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01": (
        "--moe-aux-loss-coeff 0.01 0.01, or remove --moe-router-load-balancing-type"
    ),
    "--decoder-first-pipeline-num-layers 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split": (
        "remove --decoder-first-pipeline-num-layers"
    ),
    "--decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split": (
        "remove --decoder-first-pipeline-num-layers"
    ),
    "--num-layers 14 --pipeline-model-parallel-size 4": "--num-layers 16, or --pipeline-model-parallel-size 2",
    "--use-torch-fsdp2": "unset CUDA_DEVICE_MAX_CONNECTIONS, or remove --use-torch-fsdp2",
}
"""What is wrong in a made-up Megatron-LM, and its fix."""

BASE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --bf16 --swiglu --disable-bias-linear"
)
MOE = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4"
WRONG = (
    f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 2",
    f"{MOE} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4L --mtp-num-layers 1",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step",
    "--squared-relu",
    "--use-te-activation-func",
    "--data-path a --train-data-path b",
    "--ckpt-format torch_dcp",
    "--ckpt-format fsdp_dtensor",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp --tensor-model-parallel-size 2",
    "--moe-use-upcycling",
    "--weight-decay-incr-style cosine",
    "--fp16 --train-samples 100 --lr-warmup-iters 10",
    "--recompute-modules mlp --recompute-granularity full",
    "--seq-length 510 --context-parallel-size 4",
    "--exp-avg-dtype bf16",
    "--tensor-model-parallel-size 3",
    "--num-attention-heads 9",
    "--num-virtual-stages-per-pipeline-rank 2",
    "--position-embedding-type learned_absolute --max-position-embeddings 8",
)
"""What is wrong in commands of a real Megatron-LM, where the first options of BASE are overridden."""


def refusals(checkout: Checkout, words: str, world_size: int = 8) -> list[Problem]:
    (verdict,) = judge(checkout, [command(words, world_size)], surface_or_nearest(checkout.version), "9.0")
    assert verdict.unread == ()
    return list(verdict.refusals)


def command(words: str, world_size: int = 8) -> Command:
    return Command(split(words), world_size, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def named(fixes: tuple[Fix, ...]) -> Iterator[Fix]:
    for fix in fixes:
        yield from named(fix.steps) if fix.steps else (fix,)


def wrong_fixes(checkout: Checkout, words: str) -> list[str]:
    """Return the fixes of a refused command that cannot be typed, that remove what is needed, or that do not mend."""
    known, found = surface_or_nearest(checkout.version), []
    problems = refusals(checkout, words)
    assert problems, words
    task = command(words).task(known)
    for problem in problems:
        for fix in named(problem.fix):
            argument = known.by_option.get(fix.name)
            if fix.verb in ("give-option", "drop-option") and argument is None:
                found.append(f"{fix.name} is no option")
            if fix.verb == "drop-option" and argument is not None and argument.dest in NEEDED:
                found.append(f"{fix.name} is needed")
        found += [f"{fix} has a step that mends alone" for fix in problem.fix if set(fix.steps) & set(problem.fix)]
    tried = [(problem, fix, with_fix(fix, task, known)) for problem in problems for fix in problem.fix]
    found += [f"{fix} cannot be applied" for _, fix, changed in tried if changed is None and fix.verb != "advice"]
    typed = [(problem, fix, Command(one["words"], 8, one["environ"])) for problem, fix, one in tried if one is not None]
    for (problem, fix, _), after in zip(typed, judge(checkout, [one for *_, one in typed], known, "9.0"), strict=True):
        if problem.where in [one.where for one in after.refusals]:
            found.append(f"{fix} does not mend {problem.message}")
    return [f"{words}: {one}" for one in found]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    text = ARGUMENTS.replace("\n    return parser", PARSER).replace("    if args.bf16:\n", f"{RULES}    if args.bf16:\n", 1)
    folder = make(tmp_path_factory.mktemp("megatron"), text + FUNCTIONS)
    found = find_checkout(str(folder / "pretrain_gpt.py"), {})
    assert found is not None
    return found


@pytest.mark.budget(60)
def test_a_fix_is_an_option_that_mends(checkout: Checkout) -> None:
    found = {words: [problem.fix_text for problem in refusals(checkout, words)] for words in MADE_UP}
    assert found == {words: [fix] for words, fix in MADE_UP.items()}


@pytest.mark.budget(60)
def test_no_made_up_fix_is_wrong(checkout: Checkout) -> None:
    assert [wrong for words in MADE_UP for wrong in wrong_fixes(checkout, words)] == []


@pytest.mark.budget(20)
def test_a_value_that_the_command_line_gives_under_another_name_is_told_by_its_option(checkout: Checkout) -> None:
    (problem,) = refusals(checkout, "--num-experts 8 --moe-router-num-groups 3")
    assert problem.chain[-1] == "--num-experts is 8 (command line), --moe-router-num-groups is 3 (command line)"
    (problem,) = refusals(checkout, "--overlap-param-gather-with-optimizer-step --num-virtual-stages-per-pipeline-rank 2")
    assert problem.chain[-1] == (
        "use_dist_ckpt is True (derived), --overlap-param-gather-with-optimizer-step is True (command line)"
    )
    (problem,) = refusals(
        checkout, "--overlap-param-gather-with-optimizer-step --num-virtual-stages-per-pipeline-rank 1 --ckpt-format torch"
    )
    assert problem.chain[-1].startswith(
        "virtual_pipeline_model_parallel_size is None (derived from --num-virtual-stages-per-pipeline-rank)"
    )


def test_a_folder_without_sources_derives_nothing(tmp_path: Path) -> None:
    assert derived_names(tmp_path).sources("num_moe_experts", frozenset()) == []


@pytest.mark.long
@pytest.mark.budget(600)
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")
def test_no_fix_of_a_real_megatron_is_wrong() -> None:
    found = find_checkout("pretrain_gpt.py", {}, os.environ[VARIABLE])
    assert found is not None
    assert [wrong for words in WRONG for wrong in wrong_fixes(found, f"{BASE} {words}")] == []
