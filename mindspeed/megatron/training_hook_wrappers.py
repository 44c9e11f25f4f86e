"""Wrappers of Megatron-LM's training loop at the hook points, after the rules of `mindspeed.megatron.hook_wrappers`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.planning import checkpoint_state
from mindspeed.engine.planning.checkpoint_layers import TRACKER
from mindspeed.engine.planning.fingerprint import Content
from mindspeed.engine.runtime import session
from mindspeed.job import megatron_arguments as flags
from mindspeed.megatron import model_class
from mindspeed.megatron.parsed_arguments import problems_of_job, refused_values, unsupported_arguments
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import MindSpeedError, RunError

_LOSSES: Final = {"lm loss": "loss"}
"""Names of Megatron-LM's losses that have another name in a log of mindspeed."""


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
    flags.put_launch_order(active.plan.world.known().get("platform"), vars(args), os.environ)
    validated = original(args, *rest, **kwargs)
    final = vars(validated if validated is not None else args)
    made = flags.world_of(final)
    if problems := [*unsupported_arguments(final, {}), *problems_of_job(made, active.plan, active.manager.features)]:
        raise MindSpeedError(problems)
    return validated


def put_arguments(active: session.Session, args: Any) -> None:
    """Give the parsed arguments the plan's values. Raises MindSpeedError with MS605 for every one that was set otherwise."""
    planned = {row.override.argument: row for row in active.plan.overrides}
    put = flags.put_values({name: row.override.value for name, row in planned.items()}, vars(args), _defaults(active))
    if problems := refused_values(put, active.plan.overrides):
        raise MindSpeedError(problems)
    for argument, one in put.items():
        active.proof.taken.setdefault(argument, {})["Megatron-LM"] = one.before


def _defaults(active: session.Session) -> dict[str, Any]:
    """The defaults of the arguments of the plan's Megatron-LM; empty where they are not recorded."""
    known = surface(active.plan.environment.get("megatron", ""))
    return {dest: found[0].default for dest, found in known.by_dest.items()} if known is not None else {}


@wrapper
def parse_args_for_platform(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``parse_args``, see `put_platform_values`."""
    parsed = original(*args, **kwargs)
    put_platform_values(parsed)
    return parsed


@wrapper
def validate_args_for_platform(original: Function, args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``validate_args(args, defaults)``, see `put_platform_values` and `flags.put_launch_order`."""
    put_platform_values(args)
    if (active := session.current()) is not None:
        flags.put_launch_order(active.plan.world.known().get("platform"), vars(args), os.environ)
    return original(args, *rest, **kwargs)


def put_platform_values(args: Any) -> None:
    """Put the base plan's values where ``args``, parsed or made by a script, has Megatron-LM's default or nothing.

    Arguments that other features set keep theirs.
    """
    active = session.current()
    if active is None:
        return
    base = {feature.name for feature in active.plan.base}
    others = {planned.override.argument for planned in active.plan.overrides if not base.issuperset(planned.owners)}
    answers = active.manager.call("megatron_args")
    own = {override.argument: override.value for owner, overrides in answers if owner in base for override in overrides}
    values = {argument: value for argument, value in own.items() if argument not in others}
    flags.put_values(values, vars(args), _defaults(active))


@wrapper
def train_step(
    original: Function, forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Wrap ``train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, ...)``.

    The numbers of the hook ``step_metrics`` join the losses that it returns first, which Megatron-LM has on the ranks that
    log.
    """
    if (active := session.current()) is None:
        return original(forward, data, model, optimizer, scheduler, *rest, **kwargs)
    state = LoopState(list(model), optimizer, scheduler, _steps_done())
    start = time.perf_counter()
    with session.around("around_train_step", state=state):
        result = original(forward, data, model, optimizer, scheduler, *rest, **kwargs)
    state.step += 1
    numbers = step_metrics(state)
    if isinstance(result, tuple) and isinstance(result[0], dict) and result[0]:
        if active.manager.owners("log_metrics"):
            _log_step(state.step, result[0], numbers, start)
        result[0].update(_as_losses(numbers))
    return result


def _log_step(step: int, losses: Mapping[str, Any], numbers: Mapping[str, float], start: float) -> None:
    """Hand the row of a step to features, on the last rank, as Megatron-LM logs there; reading the losses ends the step."""
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        row = {_LOSSES.get(name, name): float(loss) for name, loss in losses.items()}
        row["seconds"] = time.perf_counter() - start
        session.call("log_metrics", step=step, metrics={**row, **numbers})


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
def load_hugging_face(original: Function, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
    """Wrap ``load_checkpoint(model, optimizer, ...)``: a Hugging Face model gives the weights, and no step has been trained."""
    from megatron.training import get_args

    from mindspeed.megatron.hugging_face_weights import load_weights

    load_weights(model, get_args().load)
    if optimizer is not None:
        optimizer.reload_model_params()
    return 0, 0


@wrapper
def save_checkpoint(original: Function, iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``save_checkpoint(iteration, model, ...)``: the checkpoint records the features that it was saved with."""
    with session.around("around_save", step=iteration):
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
    if refused := checkpoint_state.refusals(found, str(folder), _KEEPING):
        raise RunError(refused)


_KEEPING: Final = "--no-load-optim --no-load-rng to keep this job, which then loads the weights alone"


def _content(active: session.Session) -> Content:
    return active.surroundings.content() if active.surroundings is not None else {}


EXTRA: Final = "mindspeed"
"""The key under which a checkpoint of Megatron-LM holds what features add."""

_extra: dict[str, Any] = {}
"""Data of features in the checkpoint that is being read."""


def _steps_done() -> int:
    from megatron.training import get_args

    return int(getattr(get_args(), "curr_iteration", 0) or 0)
