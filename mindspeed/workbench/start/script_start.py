"""Find what the ranks of a Megatron-LM command would refuse, by a start of each distinct one in a separate process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.inspection.megatron_copies import python_problem
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.world import World
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest, without_option
from mindspeed.problems import Fix, Problem, ResolutionError
from mindspeed.workbench.lint.dry_run import left_open, read_and_plan_command
from mindspeed.workbench.lint.launched_command import LaunchedCommand
from mindspeed.workbench.lint.shell_script import Word
from mindspeed.workbench.start.trainer_start import distinct_ranks
from mindspeed.workbench.verification.pool import WorkerPool

_RANK: Final = str(Path(__file__).with_name("script_rank.py"))
_SCRIPT: Final = "pretrain_gpt.py"
_FILES: Final = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path"),
    *("data_cache_path", "fim_data", "mock_data", "num_workers", "vocab_file", "merge_file", "vocab_size", "load", "save"),
    *("tokenizer_type", "tokenizer_model", "pretrained_checkpoint", "tensorboard_dir", "wandb_project"),
)
"""Arguments of what a start does not have: data, tokenizers, checkpoints and logs."""
_DEVICES: Final = (
    *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "fp8", "fp8_param_gather", "fp4", "fp4_param_gather"),
    *("tp_comm_overlap", "tp_comm_overlap_cfg"),
    *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope"),
    *("fine_grained_activation_offloading", "offload_modules", "test_mode", "check_weight_hash_across_dp_replicas_interval"),
)
"""Arguments of what needs a device's kernels, contents of tensors or other ranks: a start cannot run it."""
_CONTEXT_PARALLEL: Final = (Word("--cp-comm-type", 0), Word("p2p", 0))
"""Megatron-LM's default, which Transformer Engine's attention serves on a device, and on the CPU a feature that it names."""
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
    ResolutionError for a command without a plan on this platform, or with arguments in a file, and MS502 for a Megatron-LM
    that needs a newer Python.
    """
    if (too_old := python_problem(checkout)) is not None:
        raise ResolutionError([too_old])
    known = surface_or_nearest(environment.megatron)
    if (file := given_arguments([word.text for word in command.arguments], known).get("yaml_cfg")) is not None:
        text = f"{file.value} ({file.option}) gives data and a tokenizer, which a start without ranks does not have"
        raise ResolutionError([Problem("MS305", text, facts=(file.fact,), fix=Fix.advise("give these values as arguments"))])
    if unknown := left_open(command, known):
        text = f"the values of {', '.join(unknown)} are known only when {command.script} runs"
        raise ResolutionError([Problem("MS305", text, fix=Fix.advise("give the script its arguments and variables"))])
    for dest in _DEVICES:
        command = _without(command, dest, known)
    try:
        _, plan = read_and_plan_command(command, environment, below, also, registered)
    except ResolutionError as error:
        if all(problem.code != "MS205" for problem in error.problems):
            raise
        command = replace(command, arguments=(*command.arguments, *_CONTEXT_PARALLEL))
        _, plan = read_and_plan_command(command, environment, below, also, registered)
    size = int(plan.world.world_size)
    try:
        shorter = _shorter(command, plan.world, known, 1)
        request, plan = read_and_plan_command(shorter, replace(environment, world_size=size), below, also, registered)
    except ResolutionError:  # a schedule of a feature may need more
        shorter = _shorter(command, plan.world, known, 2)
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


def _shorter(command: LaunchedCommand, world: World, known: Surface, times: int) -> LaunchedCommand:
    """A command whose step has as few micro-batches as possible, if it has more: some times the number of stages, or of
    micro-batches in a group of a virtual pipeline."""
    fewest = times * max(world.pp, world.micro_batch_group if world.is_set("micro_batch_group") else 0)
    if not world.is_set("global_batch_size") or world.num_micro_batches <= fewest:
        return command
    for dest in ("global_batch_size", "rampup_batch_size"):
        command = _without(command, dest, known)
    size = world.micro_batch_size * world.dp * fewest
    return replace(command, arguments=(*command.arguments, Word("--global-batch-size", 0), Word(str(size), 0)))


def _without(command: LaunchedCommand, dest: str, known: Surface) -> LaunchedCommand:
    words = without_option([word.text for word in command.arguments], dest, known)
    return replace(command, arguments=tuple(Word(word, 0) for word in words))
