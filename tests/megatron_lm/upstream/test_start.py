"""What Megatron's start makes of validated arguments is made by its own code, and what that refuses is told."""

from pathlib import Path
from shutil import copy

import megatron.core
import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.problems import MindSpeedError, Problem
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import training_commands
from mindspeed.workbench.lint.upstream.process import Checkout, find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tests.megatron_lm.upstream.checkouts import ARGUMENTS, make

KNOWN = surface_or_nearest("0.16.1")
PARSER = """
    for name in ("micro-batch-size", "global-batch-size", "train-iters", "train-samples"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("lr-warmup-iters", "lr-warmup-samples"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("lr-decay-iters", "lr-decay-samples", "lr-wsd-decay-iters"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("lr", "lr-warmup-init", "min-lr", "start-weight-decay", "end-weight-decay"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--lr-warmup-fraction", type=float)
    parser.add_argument("--lr-decay-style", default="linear")
    parser.add_argument("--weight-decay-incr-style", default="linear")
    parser.add_argument("--rampup-batch-size", nargs="*")
    parser.add_argument("--load")
    parser.add_argument("--skip-train", action="store_true")
    return parser"""
RANKS = """
    assert 8 % args.tensor_model_parallel_size == 0, "ranks do not divide"
    args.data_parallel_size = 8 // args.tensor_model_parallel_size
    args.rank = 0
"""
START = """
def set_global_variables(args):
    if args is not None:
        init_num_microbatches_calculator(0, args.rampup_batch_size, args.global_batch_size,
            args.micro_batch_size, args.data_parallel_size, False)
"""
SCHEDULES = """
import nothing_that_is_installed

def get_optimizer_param_scheduler(optimizer):
    args = get_args()
    wsd_decay_steps = None
    if args.train_iters:
        if args.lr_wsd_decay_iters is not None:
            wsd_decay_steps = args.lr_wsd_decay_iters * args.global_batch_size
        if args.lr_decay_iters is None:
            args.lr_decay_iters = args.train_iters
        lr_decay_steps = args.lr_decay_iters * args.global_batch_size
        if args.lr_warmup_fraction is not None:
            lr_warmup_steps = args.lr_warmup_fraction * lr_decay_steps
        else:
            lr_warmup_steps = args.lr_warmup_iters * args.global_batch_size
    else:
        update_train_iters(args)
        lr_decay_steps = args.lr_decay_samples
        lr_warmup_steps = args.lr_warmup_samples
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=lr_warmup_steps,
        lr_decay_steps=lr_decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=100,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=wsd_decay_steps,
    )
"""
SIZES = "--micro-batch-size 1 --global-batch-size 32 --train-samples 100000"
RATES = "--micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-4"
CALCULATOR, SCHEDULER = "core/num_microbatches_calculator.py", "core/optimizer_param_scheduler.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Make a checkout whose calculator and scheduler are those of the installed megatron-core."""
    arguments = ARGUMENTS.replace("\n    return parser", PARSER)
    arguments = arguments.replace("defaults={}):\n", f"defaults={{}}):\n{RANKS}")
    folder = make(tmp_path_factory.mktemp("megatron"), arguments)
    (folder / "megatron/training/global_vars.py").write_text(START)
    (folder / "megatron/training/training.py").write_text(SCHEDULES)
    with (folder / "megatron/core/utils.py").open("a") as utils:
        utils.write("def log_single_rank(*arguments):\n    pass\n")
    for name in (CALCULATOR, SCHEDULER):
        copy(Path(megatron.core.__path__[0]).parent / name, folder / "megatron" / name)
    found = find_checkout(str(folder / "pretrain_gpt.py"), {})
    assert found is not None
    return found


def problems(checkout: Checkout, *commands: str) -> list[tuple[Problem, ...]]:
    return [verdict.problems for verdict in judge(checkout, [Command(words.split(), 8) for words in commands], KNOWN)]


RAMPS = {
    "8 7 1000": ("expected global batch size interval (24) to be divisible by global batch size increment (7)", "8 8 1000"),
    "8 4 1000": ("current global batch size (12) is not divisible by micro-batch-size (1)", "8 8 1000"),
    "12 4 1000": ("current global batch size (12) is not divisible by micro-batch-size (1)", "8 8 1000"),
    "40 8 1000": ("expected global batch size to be greater than or equal to start batch size, got 32 and 40", "24 8 1000"),
    "32 8 1000": ("the start ends in ZeroDivisionError: division by zero", "24 8 1000"),
    "8 8 0": ("the start ends in ZeroDivisionError: float division by zero", "8 8 32"),
    "8 0 9": ("batch size increment should be positive, got 0.", "8 8 9"),
}


@pytest.mark.budget(20)
def test_a_ramp_up_that_the_calculator_refuses_is_told_with_one_that_it_accepts(checkout: Checkout) -> None:
    found = problems(checkout, *(f"{SIZES} --rampup-batch-size {ramp}" for ramp in RAMPS))
    for (message, near), (problem,) in zip(RAMPS.values(), found, strict=True):
        assert problem.message.startswith(f"Megatron-LM 0.16.1 refuses this command: {message}")
        assert problem.where.startswith(f"megatron/{CALCULATOR}:")
        assert problem.fix_text == f"--rampup-batch-size {near}"
        assert "--global-batch-size is 32 (command line)" in problem.chain[0]
    nears = (f"{SIZES} --rampup-batch-size {near}" for _, near in RAMPS.values())
    assert problems(checkout, SIZES, *nears) == [()] * (len(RAMPS) + 1)


def test_a_job_that_goes_on_need_not_take_the_first_sizes(checkout: Checkout, tmp_path: Path) -> None:
    words = f"{SIZES} --rampup-batch-size 8 4 1000 --load {tmp_path}"
    assert len(problems(checkout, words)[0]) == 1
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    assert problems(checkout, words) == [()]


SCHEDULED = {
    "--lr-warmup-init 1e-3": ("args.lr_warmup_init <= args.lr", "--lr-warmup-init N (at most 0.0001)"),
    "--lr-warmup-iters 100": ("lr_warmup_steps < lr_decay_steps", "remove --lr-warmup-iters"),
    "--lr-warmup-fraction 1.0": ("lr_warmup_steps < lr_decay_steps", "remove --lr-warmup-fraction"),
    "--lr-decay-style WSD": ("wsd_decay_steps is not None", "--lr-wsd-decay-iters N"),
    "--start-weight-decay 0.2 --end-weight-decay 0.1": (
        "args.end_weight_decay >= args.start_weight_decay",
        "--end-weight-decay N (at least 0.2)",
    ),
}
ACCEPTED = (
    "--lr-warmup-init 1e-4",
    "--lr-warmup-iters 99",
    "--lr-warmup-fraction 0.5",
    "--lr-decay-style WSD --lr-wsd-decay-iters 9",
    "--start-weight-decay 0.1 --end-weight-decay 0.2",
    "--lr-warmup-iters 100 --skip-train",
)


@pytest.mark.budget(20)
def test_what_the_scheduler_refuses_is_told_by_its_arguments(checkout: Checkout) -> None:
    found = problems(checkout, *(f"{RATES} {words}" for words in SCHEDULED))
    for (message, fix), (problem,) in zip(SCHEDULED.values(), found, strict=True):
        assert problem.message == f"Megatron-LM 0.16.1 refuses this command: {message}"
        assert problem.where.startswith(f"megatron/{SCHEDULER}:")
        assert problem.fix_text == fix
    assert problems(checkout, RATES, *(f"{RATES} {words}" for words in ACCEPTED)) == [()] * (len(ACCEPTED) + 1)


@pytest.mark.budget(20)
def test_what_the_start_refuses_is_told_together_with_all_else_but_not_with_what_it_follows_from(checkout: Checkout) -> None:
    ramp_up = f"{SIZES} --rampup-batch-size 8 7 1000"
    schedule = "--lr 1e-4 --lr-warmup-samples 100 --lr-decay-samples 9 --min-lr 1"
    ranks = "--hidden-size 6 --tensor-model-parallel-size"
    found = problems(
        checkout, f"{ramp_up} {schedule} --bf16 --fp16", f"{ramp_up} {ranks} 3", f"{ramp_up} {ranks} 16 --bf16 --fp16"
    )
    ramp = "expected global batch size interval (24) to be divisible by global batch size increment (7)"
    assert [[one.message.partition(": ")[2] for one in told] for told in found] == [
        ["not args.fp16", ramp, "args.lr >= min_lr"],
        ["ranks do not divide"],
        ["ranks do not divide", "hidden does not divide", "not args.fp16"],
    ]


@pytest.mark.budget(20)
def test_what_the_start_refuses_is_told_where_there_is_no_plan(checkout: Checkout) -> None:
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SIZES} --rampup-batch-size 8 7 1000 --nosuch 1\n"
    (command,) = training_commands(script, "x.sh")
    job = CheckedJob(command, made_up("npu", "0.16.1"), checkout)
    codes = []
    for layer in (Layer("command line"), Layer("command line", world={"tp": 2})):
        ((error, _),) = check_jobs([job], layers=[layer])
        assert isinstance(error, MindSpeedError)
        codes.append([problem.code for problem in error.problems])
    assert codes == [["MS115", "MS114"], ["MS114"]]


@pytest.mark.budget(20)
def test_a_rule_that_a_trap_explains_is_told_once(checkout: Checkout) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {model} {RATES} --eval-interval 9 --tokenizer-type NullTokenizer"
    (command,) = training_commands(f"{script} --lr-warmup-init 1e-3 --transformer-impl local\n", "x.sh")
    ((error, _),) = check_jobs([CheckedJob(command, made_up("npu", "0.16.1"), checkout)])
    assert isinstance(error, MindSpeedError)
    (problem,) = error.problems
    assert problem.message.endswith("fails: the learning rate warms up from --lr-warmup-init to --lr, which is less")
