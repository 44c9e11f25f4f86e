"""Wrappers of Megatron-LM's training loop at the hook points, after the rules of `mindspeed.megatron.hook_wrappers`."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.planning import checkpoint_state
from mindspeed.engine.planning.checkpoint_layers import TRACKER
from mindspeed.engine.planning.fingerprint import Content
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.job_conditions import refusals
from mindspeed.job import megatron_arguments as flags
from mindspeed.job.world import World
from mindspeed.megatron import model_class
from mindspeed.megatron.parsed_arguments import argument_fact, contradiction, unsupported_arguments
from mindspeed.plugins.answers import completed
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import MindSpeedError, Problem, RunError, advice


@dataclass(slots=True)
class LoopState:
    """The state of a training loop, as `mindspeed.plugins.hookspecs.TrainState` describes it."""

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    step: int = 0


@wrapper
def validate_args(original: Function, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``validate_args(args, defaults)``: the plan's arguments come first, and what Megatron made of all is compared.

    Raises MS605 for an argument that is set otherwise or that local layers do not support, MS306 for a size that is not the
    plan's.
    """
    active = session.current()
    if active is None:
        return original(args, *rest, **kwargs)
    put_arguments(active, args)
    order_launches(active.plan, args, os.environ)
    validated = original(args, *rest, **kwargs)
    final = validated if validated is not None else args
    facts = {field: value for field, (value, _) in flags.world_of(vars(final)).items()}
    if problems := [*differences(active, final), *unsupported_arguments(vars(final), {}), *refusals(facts)]:
        raise MindSpeedError(problems)
    return validated


def order_launches(plan: ActivationPlan, args: Any, environ: MutableMapping[str, str]) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS``, which Megatron-LM demands under tensor and context parallelism, where it is unset.

    Only where the variable has no meaning, outside CUDA; fully sharded data parallelism demands another value.
    """
    sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    if plan.world.knows("platform") and plan.world.platform != "cuda" and not sharded:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


_CHUNKS: Final = "num_virtual_stages_per_pipeline_rank"
_LAYERS_OF_CHUNK: Final = "num_layers_per_virtual_pipeline_stage"
_LAYOUT: Final = "pipeline_model_parallel_layout"


def put_arguments(active: session.Session, args: Any) -> None:
    """Give the parsed arguments the plan's values. Raises MindSpeedError with MS605 for every one that was set otherwise."""
    values = vars(args)
    problems = []
    for planned in active.plan.overrides:
        target = flags.target_of(planned.override.argument, values)
        if target.dest not in values:
            continue
        if target.dest == _CHUNKS and values.get(_LAYERS_OF_CHUNK) is not None:
            continue  # it gives the number of chunks by the layers of each, and must stand alone
        value, wanted = values[target.dest], target.as_argument(planned.override.value)
        if value not in (None, _default(active, target.dest), wanted):
            problems.append(contradiction(planned, argument_fact(target.dest, value), wanted))
            continue
        setattr(args, target.dest, wanted)
        active.proof.taken.setdefault(planned.override.argument, {})["Megatron-LM"] = value
    if any(planned.override.argument == _LAYOUT for planned in active.plan.overrides):
        args.num_virtual_stages_per_pipeline_rank = args.num_layers_per_virtual_pipeline_stage = None  # the layout has them
    if problems:
        raise MindSpeedError(problems)


def _default(active: session.Session, dest: str) -> Any:
    """The default of an argument in the plan's Megatron-LM; None where it is not recorded."""
    known = surface(active.plan.environment.get("megatron", ""))
    return known.by_dest[dest][0].default if known is not None and dest in known.by_dest else None


@wrapper
def parse_args_for_platform(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``parse_args``, see `put_platform_values`."""
    parsed = original(*args, **kwargs)
    put_platform_values(parsed)
    return parsed


@wrapper
def validate_args_for_platform(original: Function, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``validate_args(args, defaults)``, see `put_platform_values` and `order_launches`."""
    put_platform_values(args)
    if (active := session.current()) is not None:
        order_launches(active.plan, args, os.environ)
    return original(args, *rest, **kwargs)


def put_platform_values(args: Any) -> None:
    """Put the base plan's values where ``args``, parsed or made by a script, has Megatron-LM's default or nothing.

    Arguments that other features set keep theirs.
    """
    active = session.current()
    if active is None:
        return
    values, base = vars(args), {feature.name for feature in active.plan.base}
    others = {planned.override.argument for planned in active.plan.overrides if not base.issuperset(planned.owners)}
    for owner, overrides in active.manager.call("megatron_args"):
        for override in overrides if owner in base else ():
            if override.argument in others:
                continue
            target = flags.target_of(override.argument, values)
            if target.dest in values and values[target.dest] in (None, _default(active, target.dest)):
                setattr(args, target.dest, target.as_argument(override.value))


def differences(active: session.Session, args: Any) -> list[Problem]:
    """MS306 for every size and property of the model that the plan was made for and Megatron's arguments have otherwise.

    What features make of the arguments counts: some set a size in the configuration alone.
    """
    planned = active.plan.world.known()
    made = flags.world_of(vars(args))
    features = ((type(feature), feature.args) for feature in active.manager.features)
    world = completed(World({field: value for field, (value, _) in made.items()}), features).known()
    problems = []
    for field, (_, names) in made.items():
        if field in planned and planned[field] != (value := world[field]):
            text = f"the plan was made for {field}={planned[field]}, but Megatron's argument {names[0]} gives {value}"
            option = f"--{names[0].replace('_', '-')}"
            fix = (
                f"give {option} on the command line, because mindspeed does not read values that a script sets, or change "
                f"{field} in the plan"
            )
            problems.append(Problem("MS306", text, where="Megatron-LM's validated arguments", fix=advice(fix)))
    return problems


@wrapper
def train_step(
    original: Function, forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Wrap ``train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, ...)``.

    The numbers of the hook ``step_metrics`` join the losses that it returns first, which Megatron-LM has on the ranks that
    log.
    """
    if session.current() is None:
        return original(forward, data, model, optimizer, scheduler, *rest, **kwargs)
    state = LoopState(list(model), optimizer, scheduler, _steps_done())
    with session.around("around_train_step", state=state):
        result = original(forward, data, model, optimizer, scheduler, *rest, **kwargs)
    state.step += 1
    numbers = step_metrics(state)
    if numbers and isinstance(result, tuple) and isinstance(result[0], dict) and result[0]:
        result[0].update(_as_losses(numbers))
    return result


def step_metrics(state: Any) -> dict[str, float]:
    """Return the numbers that features report for the finished step, by ``feature.name`` or a dotted name."""
    metrics: dict[str, float] = {}
    for feature, numbers in session.answers("step_metrics", state=state):
        metrics |= {name if "." in name else f"{feature}.{name}": float(value) for name, value in numbers.items()}
    return metrics


def _as_losses(numbers: dict[str, float]) -> dict[str, Any]:
    import torch

    device = torch.cuda.current_device()
    return {name: torch.tensor([value], dtype=torch.float32, device=device) for name, value in numbers.items()}


@wrapper
def generate_state_dict(
    original: Function,
    args: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Wrap ``generate_state_dict(args, model, optimizer, opt_param_scheduler, rng_state, iteration, ...)``: features add
    what they keep.

    Without an iteration it is asked for the shape of a checkpoint that is about to be read.
    """
    content = original(args, model, optimizer, scheduler, rng_state, iteration, *rest, **kwargs)
    if iteration is None:
        return content
    state = LoopState(list(model), optimizer, scheduler, iteration)
    if extra := dict(session.call("save_extra", state=state)):
        content[EXTRA] = extra
    return content


@wrapper
def load_base_checkpoint(original: Function, load_dir: Any, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``_load_base_checkpoint(load_dir, args, ...)``, which returns the content of a checkpoint and its folder.

    A GPTModel can load the checkpoint of a HybridModel with the same layers.
    What features have in it is kept for them. Raises RunError with MS613 for every change of features after which its
    state cannot be taken over; a run that takes only the weights (``--finetune``, ``--no-load-optim``) may change them all.
    Raises RunError with MS602 for a format that this Megatron cannot read, and with MS613 for names of other layers.
    """
    active = session.current()
    weights_alone = getattr(args, "finetune", False) or getattr(args, "no_load_optim", False)
    pattern = ""
    if active is not None and (folder := _checkpoint_to_load(load_dir, args)) is not None:
        sharded = bool(getattr(args, "use_distributed_optimizer", False)) and not weights_alone
        megatron = active.plan.environment.get("megatron")
        problem = checkpoint_state.unreadable_format(folder, megatron, shards_optimizer=sharded)
        if problem is not None:
            raise RunError([problem])
        if unfit := checkpoint_state.other_layers(folder, active.plan):
            raise RunError(checkpoint_state.refusals(unfit, str(folder)))
        if pattern := model_class.pattern_for_gpt(folder, args):
            model_class.point_at_pattern(kwargs.get("sharded_state_dict") or {}, pattern)
    result = original(load_dir, args, *rest, **kwargs)
    content, folder = (*result, None, None)[:2] if isinstance(result, tuple) else (None, None)
    if pattern and content:
        model_class.as_gpt(content, pattern)
    if active is not None and folder and not weights_alone:
        _compare_record(active, Path(folder))
    if isinstance(content, dict) and EXTRA in content:
        _extra.update(content[EXTRA])
    return result


def _checkpoint_to_load(load_dir: Any, args: Any) -> Path | None:
    """The folder of the checkpoint that Megatron-LM reads next; None where its tracker file does not say."""
    try:
        tracker = (Path(load_dir) / TRACKER).read_text().strip()
        step = str(getattr(args, "ckpt_step", None) or tracker)
        return Path(load_dir) / (f"iter_{int(step):07d}" if step.isdigit() else step)
    except (OSError, TypeError):
        return None


@wrapper
def load_checkpoint(original: Function, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``load_checkpoint(model, optimizer, opt_param_scheduler, ...)``: features take back what they have saved."""
    _extra.clear()
    result = original(model, optimizer, scheduler, *rest, **kwargs)
    state = LoopState(list(model), optimizer, scheduler, result[0] if isinstance(result, tuple) else 0)
    for feature, extra in _extra.items():
        session.tell("load_extra", feature, state=state, data=extra)
    _extra.clear()
    return result


@wrapper
def save_checkpoint(original: Function, iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``save_checkpoint(iteration, model, ...)``: the checkpoint records the features that it was saved with."""
    result = original(iteration, *args, **kwargs)
    active = session.current()
    if active is not None and not kwargs.get("non_persistent_ckpt"):
        _write_record(active, iteration)
    return result


def _write_record(active: session.Session, iteration: int) -> None:
    """Write on rank 0, into the folder of the iteration, which exists also while others still write into it."""
    import torch.distributed as dist
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    folder = Path(get_checkpoint_name(get_args().save, iteration, return_base_dir=True))
    if dist.get_rank() == 0 and folder.is_dir():
        checkpoint_state.record_of(active.plan, active.classes, _content(active)).write(folder)


def _compare_record(active: session.Session, folder: Path) -> None:
    record = checkpoint_state.read_record(folder) if folder.is_dir() else None
    if record is None:
        return
    found = checkpoint_state.changes(record, active.plan, active.classes, _content(active), folder)
    if refused := checkpoint_state.refusals(found, str(folder)):
        raise RunError(refused)


def _content(active: session.Session) -> Content:
    return active.surroundings.content() if active.surroundings is not None else {}


EXTRA: Final = "mindspeed"
"""The key under which a checkpoint of Megatron-LM holds what features add."""

_extra: dict[str, Any] = {}
"""Data of features in the checkpoint that is being read."""


def _steps_done() -> int:
    from megatron.training import get_args

    return int(getattr(get_args(), "curr_iteration", 0) or 0)
