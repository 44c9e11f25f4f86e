"""Find what the ranks of a Megatron-LM command would refuse, by a start of each distinct one in a separate process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.world import World
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest, without_option
from mindspeed.problems import Fix, Problem, ResolutionError
from mindspeed.workbench.lint.dry_run import read_and_plan_command
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.shell_script import Word
from mindspeed.workbench.start.trainer_start import distinct_ranks
from mindspeed.workbench.verification.pool import WorkerPool

_RANK: Final = str(Path(__file__).with_name("script_rank.py"))
_SCRIPT: Final = "pretrain_gpt.py"
_FILES: Final = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path"),
    *("data_cache_path", "mock_data", "num_workers", "vocab_file", "merge_file", "vocab_size", "load", "save"),
    *("tokenizer_type", "tokenizer_model", "pretrained_checkpoint", "tensorboard_dir", "wandb_project"),
)
"""Arguments of what a start does not have: data, tokenizers, checkpoints and logs."""
_VOCABULARY: Final = 32_000
"""Tokens of the vocabulary where only a tokenizer would say how many there are."""


def start(
    pool: WorkerPool,
    command: LaunchedCommand,
    checkout: Path,
    environment: Environment,
    below: Sequence[Layer] = (),
    also: Sequence[Layer] = (),
    registered: Collection[str] = (),
) -> None:
    """Start the distinct ranks of a command up to the end of their first step, with the Megatron-LM in ``checkout``.

    The workers of ``pool`` find it on their path. ``environment`` has the platform of the pool; the other arguments are those
    of `read_and_plan_command`. Steps have as many micro-batches as stages. Raises RunError with what one refuses, and
    ResolutionError for a command without a plan on this platform, or with arguments in a file.
    """
    known = surface_or_nearest(environment.megatron)
    if (file := given_arguments([word.text for word in command.arguments], known).get("yaml_cfg")) is not None:
        text = f"{file.value} ({file.option}) gives data and a tokenizer, which a start without ranks does not have"
        raise ResolutionError([Problem("MS305", text, facts=(file.fact,), fix=Fix.advise("give these values as arguments"))])
    _, plan = read_and_plan_command(command, environment, below, also, registered)
    size = int(plan.world.world_size)
    shorter = _shorter(command, plan.world, environment.megatron)
    request, plan = read_and_plan_command(shorter, replace(environment, world_size=size), below, also, registered)
    words: Sequence[str] = request.rest
    for dest in _FILES:
        words = without_option(words, dest, known)
    rows = plan.world.known().get("vocab_size") or _VOCABULARY
    mock = ("--mock-data", "--num-workers", "0", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows - 1))
    script = checkout / Path(command.program).name
    program = script if script.is_file() else checkout / _SCRIPT
    arguments = (str(program), [*words, *mock], plan.to_json(), dict(command.environ))
    pool.call_alone(_RANK, "start", distinct_ranks(plan), size, *arguments)


def _shorter(command: LaunchedCommand, world: World, megatron: str | None) -> LaunchedCommand:
    """A command whose step has as many micro-batches as stages, if it has more."""
    if not world.is_set("global_batch_size") or world.num_micro_batches <= world.pp:
        return command
    words: Sequence[str] = [word.text for word in command.arguments]
    for dest in ("global_batch_size", "rampup_batch_size"):
        words = without_option(words, dest, surface_or_nearest(megatron))
    words = [*words, "--global-batch-size", str(world.micro_batch_size * world.dp * world.pp)]
    return replace(command, arguments=tuple(Word(word, 0) for word in words))
