"""Turn calls of ``register_patch`` into patches of the engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from mindspeed.inspection.sites import find_site
from mindspeed.inspection.source import find_module
from mindspeed.legacy import object_refs
from mindspeed.plugins.patches import Patch, Replace, Set, Wrap
from mindspeed.plugins.problems import MindSpeedError, Problem
from mindspeed.resolution.planned_feature import PlanNote

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
    """The patches of one owner's calls, what the reader must know of them, and MS409 for what cannot be taken."""
    problems = [problem for one in registrations for problem in _problems_of(one)]
    left_out = [one for one in registrations if one.dummy and _absent(one)]
    taken, rows = force_overridden([one for one in registrations if one not in left_out])
    rows += [_row("left-out", one, "its package is not installed, and a dummy is never planted") for one in left_out]
    rows += [_row("note", one, "create_dummy is not needed: the target exists") for one in taken if one.dummy]
    wrong = {problem.where for problem in problems}
    return [_patch(one, number) for number, one in enumerate(taken) if one.dotted not in wrong], rows, problems


def require_patches(registrations: Sequence[Registration]) -> list[Patch]:
    """The patches of one owner's calls. Raises MindSpeedError with MS409 for what cannot be taken."""
    patches, _, problems = patches_of(registrations)
    if problems:
        raise MindSpeedError(problems)
    return patches


def force_overridden(registrations: Sequence[Registration]) -> tuple[list[Registration], list[PlanNote]]:
    """Of several replacements of one target, those before a forced one give way to it."""
    last = {one.target: one for one in registrations if one.force and not one.wraps}
    kept, rows, passed = [], [], set[str]()
    for one in dict.fromkeys(registrations):
        winner = last.get(one.target)
        if winner is None or one.wraps or one.target in passed:
            kept.append(one)
        elif one is winner:
            passed.add(one.target)
            kept.append(one)
        else:
            rows.append(_row("left-out", one, f"{winner.owner} replaces it by force with {winner.name}"))
    return kept, rows


def _row(kind: str, one: Registration, text: str) -> PlanNote:
    return PlanNote(kind, one.owner, f"patch of {one.dotted} with {one.name}: {text}")


def _patch(one: Registration, number: int) -> Patch:
    if one.new is None or isinstance(one.new, str | int | float | bool):
        return Set(one.target, one.new, "registered through the old names; a plain value is set")
    value = object_refs.reference(one.owner, one.dotted, one.new, number)
    if one.wraps:
        rule = f"its name {one.new.__name__} ends in {next(s for s in SUFFIXES if one.new.__name__.endswith(s))}"
        return Wrap(one.target, value, f"registered through the old names; a wrapper, since {rule}")
    return Replace(one.target, value, "registered through the old names; a replacement, since it is not named a wrapper")


def _absent(one: Registration) -> bool:
    """Return whether the whole top-level package of the target is not installed."""
    site = find_site(one.target)
    return site is not None and site.kind == "absent"


def _problems_of(one: Registration) -> Iterator[Problem]:
    if one.dummy and find_site(one.target) is None:
        text = f"{one.owner} asks for a dummy {one.dotted}, which does not exist"
        yield _problem(one, text, "mindspeed never plants a name: define it in your own package and call it there")
    elif one.new is None and not (one.dummy and _absent(one)):
        text = f"{one.owner} patches {one.dotted} with nothing"
        yield _problem(one, text, "give register_patch a function or class, or remove the patch")
    elif not one.wraps and _is_written_as_wrapper(one.new):
        text = f"{one.owner} replaces {one.dotted} with {one.name}, which is written as a wrapper"
        yield _problem(one, text, f"end its name with a suffix that says so: {one.new.__name__}_wrapper")


def _problem(one: Registration, text: str, fix: str) -> Problem:
    return Problem("MS409", text, (one.owner,), where=one.dotted, fix=fix)


def _is_written_as_wrapper(new: Any) -> bool:
    """Return whether a function takes one original and makes a function, so that it cannot stand in its place."""
    code = getattr(new, "__code__", None)
    if not isinstance(code, CodeType) or code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & 0b1100:
        return False
    return code.co_varnames[0] in _ORIGINAL and code.co_varnames[0] in code.co_cellvars
