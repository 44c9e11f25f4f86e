"""Merge of the options that several features choose for one process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world

from mindspeed.problems.fixes import Fix
from mindspeed.problems.problem import MindSpeedError, Problem


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
