"""Wrappers of megatron-core's functions at the hook points: arguments, phases of the run and hooks, in this order.

Each wrapper stands under the name of the function that it wraps. It asks for the active plan at every call, so one that
outlives its plan does what the original does. Megatron is imported only inside the calls.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world

from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.job_conditions import features_without, features_without_model
from mindspeed.job.config import world_of_config
from mindspeed.megatron.argument_overrides import override_fields, override_parameters
from mindspeed.megatron.module_specs import with_parts
from mindspeed.plugins.hookspecs import Unit
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import Fix, MindSpeedError, Problem


def merged_options(group: str, answers: Sequence[tuple[str, Any]]) -> Any:
    """Return one options object with the fields that each feature has set; ``answers`` are ``(feature, options)``.

    A field counts as set where it differs from a new object of its class. Raises MS402 for each field that two features set
    to different values, and for options of two classes.
    """
    (first, options), *others = answers
    merged = _as_object(options)
    owners = dict.fromkeys(_set_fields(merged), first)
    problems = []
    for feature, other in others:
        if type(other) is not type(options):
            values = f"{first} gives {type(options).__name__}, {feature} gives {type(other).__name__}"
            problems.append(_disagreement(group, "", (first, feature), values))
            continue
        for path, value in _set_fields(_as_object(other)).items():
            owner = owners.setdefault(path, feature)
            if owner == feature:
                holder, _, name = path.rpartition(".")
                setattr(attrgetter(holder)(merged) if holder else merged, name, value)
            elif (before := attrgetter(path)(merged)) != value:
                values = f"{owner} sets {before!r}, {feature} sets {value!r}"
                problems.append(_disagreement(group, path, (owner, feature), values))
    if problems:
        raise MindSpeedError(problems)
    return vars(merged) if isinstance(options, dict) else merged


def _as_object(options: Any) -> Any:
    return SimpleNamespace(**options) if isinstance(options, dict) else options


def _disagreement(group: str, field: str, features: tuple[str, ...], values: str) -> Problem:
    text = f"the options {field} of process group {group} have two values: {values}".replace("  ", " ")
    return Problem("MS402", text, features, fix=tuple(map(Fix.remove_feature, features)))


def _set_fields(options: Any) -> dict[str, Any]:
    """``{"config.max_ctas": 8}`` of the fields that differ from a new object of the same class; all where none can be made."""
    try:
        default = dict(_fields(type(options)()))
    except TypeError:
        default = {}
    return {path: value for path, value in _fields(options) if path not in default or default[path] != value}


def _fields(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the public fields of an options object by their paths, down to plain values."""
    for name in dir(options):
        if name.startswith("_") or callable(value := getattr(options, name, None)):
            continue
        nested = [] if prefix or isinstance(value, str | int | float | list | tuple | None) else [*_fields(value, f"{name}.")]
        yield from nested or [(f"{prefix}{name}", value)]


@contextmanager
def destroyed_after() -> Iterator[None]:
    """Destroy Megatron's process groups after the block, in which it forgets most of them."""
    state = vars(parallel_state)
    groups = set(_process_groups(state.values())) - {dist.group.WORLD}
    yield
    state.update({name: None for name, value in state.items() if isinstance(value, dist.ProcessGroup) and value in groups})
    for group in groups & _world.pg_map.keys():
        dist.destroy_process_group(group)


def _process_groups(values: Iterable[Any]) -> Iterator[dist.ProcessGroup]:
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _process_groups(value)


_initialising: Final[set[int]] = set()
"""Identities of the configurations whose ``__post_init__`` is running."""


@wrapper
def transformer_config_post_init(original: Function, config: Any, *args: Any) -> None:
    """Wrap ``TransformerConfig.__post_init__`` and those of its subclasses in Megatron, of which the outermost counts."""
    if id(config) in _initialising:
        original(config, *args)
        return
    _initialising.add(id(config))
    try:
        override_fields(config)
        original(config, *args)
    finally:
        _initialising.discard(id(config))
    session.call("config_ready", without=features_without(world_of_config(config)), config=config)


@wrapper
def config_post_init(original: Function, config: Any, *args: Any) -> None:
    """Wrap the ``__post_init__`` of another configuration class."""
    override_fields(config)
    original(config, *args)
    features_without(world_of_config(config))


def model_init(original: Function) -> Function:
    """Wrap the ``__init__`` of a model."""
    return override_parameters(original)


def hybrid_model_init(original: Function) -> Function:
    """Wrap ``HybridModel.__init__``, whose stack has the specs of single layers.

    Its default is a model without positions, and that of scripts, which hand on Megatron-LM's argument, has learned ones.
    """
    initialize = override_parameters(original, position_embedding_type="learned_absolute")
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        stack, config, pattern = given["hybrid_stack_spec"], given["config"], given.get("hybrid_layer_pattern")
        facts = {"hybrid_layer_pattern": pattern} if pattern else {}
        parts = _built_parts(stack.submodules, pattern or "")
        given["hybrid_stack_spec"] = dataclasses.replace(stack, submodules=_with_features(parts, config, facts))
        initialize(*bound.args, **bound.kwargs)

    return init


def _built_parts(submodules: Any, pattern: str) -> Any:
    """Return the specs of a hybrid stack without those of layers that no character of the pattern stands for."""
    unused = [name for layer, name in _STACK.items() if pattern and layer not in pattern]
    defaults = {field.name: field.default for field in dataclasses.fields(submodules) if field.name in unused}
    return dataclasses.replace(submodules, **defaults)


_STACK: Final = {
    "*": "attention_layer",
    "+": "mla_layer",
    "D": "dsa_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
    "M": "mamba_layer",
    "G": "gdn_layer",
}
"""Specs of a hybrid stack by the character of their layer."""


@wrapper
def initialize_model_parallel(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``initialize_model_parallel``: with the groups, set-up has ended."""
    result = override_parameters(original)(*args, **kwargs)
    if _implemented("groups_created"):
        session.call("groups_created", sizes=group_sizes(), get_group=get_group)
    session.enter("build")
    return result


@wrapper
def destroy_model_parallel(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``destroy_model_parallel``: on the CPU the process groups are destroyed, which Megatron only forgets."""
    session.enter("teardown")
    session.call("groups_destroyed")
    active = session.current()
    if active is None or active.plan.environment.get("platform") != "cpu":
        return original(*args, **kwargs)

    with destroyed_after():
        return original(*args, **kwargs)


@wrapper
def get_nccl_options(original: Function, pg_name: str, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_nccl_options(pg_name, nccl_comm_cfgs)``: options of features override Megatron's."""
    answers = session.answers("group_options", group=pg_name)
    return merged_options(pg_name, answers) if answers else original(pg_name, *args, **kwargs)


@wrapper
def get_block_submodules(original: Function, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``_get_block_submodules(config, spec, ...)``."""
    return _with_features(original(config, *args, **kwargs), config, {})


def _with_features(spec: Any, config: Any, facts: dict[str, Any]) -> Any:
    """Return a specification as features change it, which are asked about the job with further ``facts``."""
    active = session.current()
    if active is None:
        return spec
    facts = world_of_config(config) | facts_of_spec(spec) | facts
    without = features_without(facts) | features_without_model("spec", spec, config)
    return active.manager.chain("layer_spec", without, spec=spec, config=config)


def facts_of_spec(spec: Any) -> dict[str, Any]:
    """Return what the modules of a specification say of the job: whether they are those of Transformer Engine."""
    found: set[type] = set()

    def collect(name: str, part: Any) -> Any:
        module = getattr(part, "module", part)
        if isinstance(module, type):
            found.add(module)
        return part

    with_parts(spec, collect)
    return {"transformer_engine_layers": any(module.__module__.startswith(_TRANSFORMER_ENGINE) for module in found)}


_TRANSFORMER_ENGINE: Final = ("megatron.core.extensions.transformer_engine", "transformer_engine.")


@wrapper
def get_megatron_optimizer(original: Function, config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_megatron_optimizer(config, model_chunks, ...)``."""
    session.call("model_built", without=features_without_model("model", model_chunks), chunks=model_chunks)
    without = features_without(world_of_config(config))
    optimizer = override_parameters(original)(config, model_chunks, *args, **kwargs)
    without |= features_without_model("optimizer", optimizer)
    session.call("optimizer_built", without=without, optimizer=optimizer)
    return optimizer


@wrapper
def finalize_model_grads(original: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``finalize_model_grads(model, ...)``, after which the gradients of a step are those of the optimizer."""
    result = original(model, *args, **kwargs)
    parameters = [pair for chunk in model for pair in chunk.named_parameters() if pair[1].requires_grad]
    found = [(name, getattr(parameter, "main_grad", None), parameter.grad) for name, parameter in parameters]
    gradients = [(name, grad if main is None else main) for name, main, grad in found if main is not None or grad is not None]
    session.call("gradients_ready", chunks=model, gradients=gradients)
    return result


def get_forward_backward_func(original: Function) -> Function:
    """Wrap ``get_forward_backward_func``: it returns the same wrapper as long as Megatron returns the same schedule."""

    @functools.lru_cache(maxsize=4)
    def schedule_wrapper(schedule: Function) -> Function:
        return functools.wraps(schedule)(functools.partial(_forward_backward, schedule))

    @functools.wraps(original)
    def get_function(*args: Any, **kwargs: Any) -> Function:
        return schedule_wrapper(original(*args, **kwargs))

    return get_function


def _forward_backward(schedule: Function, **arguments: Any) -> Any:
    """Run one pass of a schedule. A step lasts until the next one begins, so that the optimizer belongs to it."""
    forward_only = bool(arguments.get("forward_only"))
    session.enter("evaluate" if forward_only else "step")
    if _implemented("schedule"):
        schedule = _only_answer("schedule", "a pipeline schedule", config=config_of(arguments["model"])) or schedule
    if _implemented("around_data_load"):
        arguments["data_iterator"] = _observed(arguments["data_iterator"])
    if not _implemented("around_schedule"):
        return schedule(**arguments)
    model = arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    count = arguments["num_microbatches"]
    with session.around("around_schedule", chunks=chunks, forward_only=forward_only, micro_batches=count):
        return schedule(**arguments)


class _ObservedIterator:
    """A data iterator whose micro-batches are loaded inside of what features put around loading."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> _ObservedIterator:
        return self

    def __next__(self) -> Any:
        with session.around("around_data_load"):
            return next(self._iterator)


def _observed(iterators: Any) -> Any:
    """Return the data iterators of a schedule, one or one for each model chunk, as `_ObservedIterator`."""
    if isinstance(iterators, list):
        return [_observed(iterator) for iterator in iterators]
    return iterators if iterators is None else _ObservedIterator(iterators)


_UNIT: Final = "mindspeed_unit"
"""The attribute by which the output of a forward step names its unit to the backward step."""


def forward_step(original: Function) -> Function:
    """Wrap ``schedules.forward_step``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        unit = Unit(arguments.get("current_microbatch"), arguments.get("vp_stage") or 0)
        with session.around("around_forward_step", unit=unit):
            output, tokens = original(*args, **kwargs)
        tensor = output[0] if isinstance(output, list) else output
        if tensor is not None:
            setattr(tensor, _UNIT, unit)
        return output, tokens

    return step


@wrapper
def backward_step(original: Function, input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``schedules.backward_step(input_tensor, output_tensor, ...)``."""
    tensor = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
    with session.around("around_backward_step", unit=getattr(tensor, _UNIT, Unit(None))):
        return original(input_tensor, output_tensor, *args, **kwargs)


@wrapper
def save(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``dist_checkpointing.save``."""
    session.enter("checkpoint")
    try:
        return original(*args, **kwargs)
    finally:
        session.enter(None)


def config_of(model: Any) -> Any:
    """Return the TransformerConfig of a model, or of the first of its chunks."""
    from megatron.core.utils import get_model_config

    return get_model_config(model[0] if isinstance(model, list) else model)


def group_sizes() -> dict[str, int]:
    """Return the sizes of Megatron's groups: tp, pp, cp, dp, ep."""
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
    }


def get_group(name: str) -> Any:
    """Return a group of this rank by its name in Megatron's ProcessGroupCollection: tp, pp, cp, dp, dp_cp, ep, embd ..."""
    from megatron.core import parallel_state, process_groups_config

    collection = getattr(process_groups_config, "ProcessGroupCollection", None)
    if collection is None:  # Megatron 0.14 has two classes, and only that without the data-parallel groups reads the state
        if name in ("dp", "dp_cp"):
            return parallel_state.get_data_parallel_group(with_context_parallel=name == "dp_cp")
        collection = process_groups_config.ModelCommProcessGroups
    return getattr(collection.use_mpu_process_groups([name]), name)


def _implemented(hook: str) -> bool:
    active = session.current()
    return active is not None and bool(active.manager.owners(hook))


def _only_answer(hook: str, subject: str, **arguments: Any) -> Any:
    """Return the one answer of a hook that is not None. Raises MS402 when several features give one."""
    answers = session.answers(hook, **arguments)
    if len(answers) > 1:
        names = tuple(feature for feature, _ in answers)
        text = f"{' and '.join(names)} both give {subject}"
        raise MindSpeedError([Problem("MS402", text, names, fix=Fix.advise("remove one of these features"))])
    return answers[0][1] if answers else None
