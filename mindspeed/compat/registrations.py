"""Turn calls of ``register_patch`` into patches of the engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from mindspeed.compat import object_refs
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.inspection.source import find_module
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.plugins.patches import Patch, Replace, Set, Wrap
from mindspeed.problems import MindSpeedError, Problem, advice

SUFFIXES: Final = ("wrapper", "decorator")
"""MindSpeed's rule: a callable whose name ends so wraps the original, any other one replaces it."""

_ORIGINAL: Final = frozenset(
    {"fn", "func", "function", "f", "original", "orig", "orig_func", "original_fn", "wrapped", "method"}
)


@dataclass(frozen=True, slots=True)
class Registration:
    """Record a call of ``register_patch``; ``dotted`` is the target as it was written: ``"megatron.core.a.B.method"``."""

    owner: str
    dotted: str
    new: Any
    force: bool = False
    dummy: bool = False

    @property
    def target(self) -> str:
        """``"module:qualname"``."""
        return target_of(self.dotted)

    @property
    def wraps(self) -> bool:
        return str(getattr(self.new, "__name__", "")).endswith(SUFFIXES)

    @property
    def name(self) -> str:
        """The new object's name, for messages."""
        return getattr(self.new, "__qualname__", None) or repr(self.new)


@functools.lru_cache(maxsize=1024)
def target_of(dotted: str) -> str:
    """``"a.b.C.m"`` -> ``"a.b:C.m"``: the longest part that is a module. Imports nothing."""
    parts = dotted.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        if module in sys.modules or find_module(module) is not None:
            return f"{module}:{'.'.join(parts[count:])}"
    first_class = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    count = max(1, min(first_class, len(parts) - 1))
    return f"{'.'.join(parts[:count])}:{'.'.join(parts[count:])}"


def patches_of(registrations: Sequence[Registration]) -> tuple[list[Patch], list[PlanNote], list[Problem]]:
    """The patches of one owner's calls, notes for the reader, and MS409 for unsupported ones."""
    problems = [problem for call in registrations for problem in _problems_of(call)]
    left_out = [call for call in registrations if call.dummy and _absent(call)]
    taken, rows = force_overridden([call for call in registrations if call not in left_out])
    why = "its package is not installed, and mindspeed creates no dummy modules"
    rows += [_row("left-out", call, why) for call in left_out]
    rows += [_row("note", call, "create_dummy is not needed: the target exists") for call in taken if call.dummy]
    wrong = {problem.where for problem in problems}
    return [_patch(call, number) for number, call in enumerate(taken) if call.dotted not in wrong], rows, problems


def require_patches(registrations: Sequence[Registration]) -> list[Patch]:
    """The patches of one owner's calls. Raises MindSpeedError with MS409 for unsupported ones."""
    patches, _, problems = patches_of(registrations)
    if problems:
        raise MindSpeedError(problems)
    return patches


def force_overridden(registrations: Sequence[Registration]) -> tuple[list[Registration], list[PlanNote]]:
    """Of several replacements of one target, those before a forced one give way to it."""
    last = {call.target: call for call in registrations if call.force and not call.wraps}
    kept, rows, passed = [], [], set[str]()
    for call in dict.fromkeys(registrations):
        winner = last.get(call.target)
        if winner is None or call.wraps or call.target in passed:
            kept.append(call)
        elif call is winner:
            passed.add(call.target)
            kept.append(call)
        else:
            rows.append(_row("left-out", call, f"{winner.owner} replaces it with {winner.name} and force=True"))
    return kept, rows


def _row(kind: str, call: Registration, text: str) -> PlanNote:
    return PlanNote(kind, call.owner, f"patch of {call.dotted} with {call.name}: {text}")


def _patch(call: Registration, number: int) -> Patch:
    if call.new is None or isinstance(call.new, str | int | float | bool):
        return Set(call.target, call.new, "registered through the old names as a plain value")
    value = object_refs.reference(call.owner, call.dotted, call.new, number)
    if call.wraps:
        rule = f"its name {call.new.__name__} ends in {next(s for s in SUFFIXES if call.new.__name__.endswith(s))}"
        return Wrap(call.target, value, f"registered through the old names as a wrapper, because {rule}")
    return Replace(call.target, value, "registered through the old names as a replacement, because its name is not a wrapper's")


def _absent(call: Registration) -> bool:
    """Return whether the whole top-level package of the target is not installed."""
    site = find_site(call.target)
    return site is not None and site.kind == "absent"


def _problems_of(call: Registration) -> Iterator[Problem]:
    if call.dummy and find_site(call.target) is None:
        text = f"{call.owner} requests a dummy module {call.dotted}, which does not exist"
        yield _problem(call, text, "mindspeed creates no dummy modules: define the name in your package and call it there")
    elif call.new is None and not (call.dummy and _absent(call)):
        text = f"{call.owner} patches {call.dotted} with None"
        yield _problem(call, text, "give register_patch a function or class, or remove the patch")
    elif not call.wraps and _is_written_as_wrapper(call.new):
        text = f"{call.owner} replaces {call.dotted} by {call.name}, but it is a wrapper: it takes a function and returns one"
        yield _problem(call, text, f"rename it to {call.new.__name__}_wrapper, so that it is used as a wrapper")


def _problem(call: Registration, text: str, fix: str) -> Problem:
    return Problem("MS409", text, (call.owner,), where=call.dotted, fix=advice(fix))


def _is_written_as_wrapper(new: Any) -> bool:
    """Return whether a function takes one original and makes a function, so that it cannot stand in its place."""
    code = getattr(new, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & 0b1100:
        return False
    return code.co_varnames[0] in _ORIGINAL and code.co_varnames[0] in code.co_cellvars
