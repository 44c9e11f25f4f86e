"""What Megatron-LM makes of arguments is what the job of a plan says: found by running its parser and its validation."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from shlex import split

import pytest

from mindspeed.engine.inspection.cli_arguments import Argument, Surface
from mindspeed.engine.resolution.environment import made_up
from mindspeed.job.fields import FIELDS
from mindspeed.job.megatron_arguments import world_of
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
from mindspeed.megatron_lm.training_request import without_overridden
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.lint.judgement import CheckedJob, check_jobs
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.upstream.process import Checkout, find_checkout
from mindspeed.workbench.lint.upstream.rules import Command, judge
from tests.megatron_lm.checkout import VARIABLE
from tools.functional_tests import functional_tests
from tools.lint_results import DENSE, ENVIRON, MOE
from tools.published_commands import VARIABLES, published

pytestmark = [pytest.mark.long, pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")]

PLAIN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 9"
)
SHARDED = f"{PLAIN} --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --bf16"
BASES = (
    DENSE,
    f"{DENSE} {MOE}",
    PLAIN,
    f"{SHARDED} --use-megatron-fsdp --ckpt-format fsdp_dtensor",
    f"{SHARDED} --use-torch-fsdp2",
)
TEXTS = {
    "pipeline_model_parallel_layout": ("Ettt|(tt|)*2,tL", "Et|(tt|)*3L", "Etttt|ttttL"),
    "moe_layer_freq": ("2", "([0]*1+[1]*7)"),
    "hybrid_layer_pattern": ("*-*-*-*-", "*E|*E|*E|*E"),
}
NUMBERS = {"int": ("1", "2", "4", "8"), "float": ("0.5", "1.0")}
SEEDS = range(3000)


def checkout() -> Checkout:
    found = find_checkout("pretrain_gpt.py", {}, os.environ[VARIABLE])
    assert found is not None
    return found


def options(known: Surface) -> Iterator[list[str]]:
    """Every option from which a field of a job is read, with values of every kind, and some beside them."""
    dests = dict.fromkeys(dest for field in FIELDS.values() for dest in field.arguments)
    for argument in (argument for dest in dests for argument in known.by_dest.get(dest, ()) if argument.options):
        yield from values_of(argument)
    yield from map(split, ("--ckpt-format fsdp_dtensor", "--group-query-attention --num-query-groups 4"))
    if "freeze_all_layers" in known.by_dest:
        yield ["--freeze-all-layers"]


def values_of(argument: Argument) -> Iterator[list[str]]:
    if not argument.takes_value:
        yield from ([option] for option in argument.options)
    values = argument.choices or TEXTS.get(argument.dest) or NUMBERS.get(argument.type or "", ())
    yield from ([argument.options[0], str(value)] for value in values if argument.takes_value)


def commands(known: Surface) -> Iterator[list[str]]:
    """Each option on every base, and two or three drawn ones."""
    every = list(options(known))
    yield from ([*split(base), *option] for base in BASES for option in ([], *every))
    for seed in SEEDS:
        draw = random.Random(seed)
        yield [*split(draw.choice(BASES)), *(word for one in draw.sample(every, draw.choice((2, 2, 3))) for word in one)]


@pytest.mark.budget(600)
def test_every_value_that_megatron_changes_by_itself_is_that_of_the_job() -> None:
    known = surface_or_nearest(checkout().version)
    drawn = [Command(words, 16, {} if "fsdp" in " ".join(words) else ENVIRON) for words in commands(known)]
    drawn += [
        Command([word.text for word in test.command.arguments], test.command.world_size or 8, dict(test.command.environ))
        for test in functional_tests(Path(os.environ[VARIABLE]))
    ]
    defaults = {dest: found[0].default for dest, found in known.by_dest.items()}
    accepted, different = 0, []
    for command, verdict in zip(drawn, judge(checkout(), drawn, known, "9.0"), strict=True):
        if verdict.problems or not verdict.job:
            continue
        accepted += 1
        read = without_overridden(given_arguments(command.words, known), known)
        given = {dest: argument.value for dest, argument in read.items()}
        job = {field: value for field, (value, _) in world_of(defaults | given).items()}
        made = {field: value for field, (value, _) in verdict.job.items()}
        different += [(field, value, made[field], command.words) for field, value in job.items() if made.get(field) != value]
    assert accepted > len(drawn) / 3
    assert different == []


@pytest.mark.budget(300)
@pytest.mark.skipif(not all(name in os.environ for name in VARIABLES.values()), reason="no checkouts of published commands")
@pytest.mark.parametrize("platform", ["npu", "cpu"])
def test_no_published_command_has_another_job_on_its_ranks_than_in_its_plan(platform: str) -> None:
    launched: list[LaunchedCommand] = [one for name in VARIABLES.values() for one in published(Path(os.environ[name]))]
    found = checkout()
    jobs = [CheckedJob(command, made_up(platform, found.version), found) for command in launched]
    problems = [one for plan, _ in check_jobs(jobs) if isinstance(plan, MindSpeedError) for one in plan.problems]
    assert [problem for problem in problems if problem.where == "Megatron-LM's validated arguments"] == []
    assert [problem for problem in problems if problem.message.startswith("Megatron's argument ")] == []
