"""Old flags that map to no feature: replaced by Megatron-LM's, not needed, skipped, or without an equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from mindspeed.compat.old_flags.model_arguments import OTHER_PROGRAM, RULES
from mindspeed.files.tables import fields_of, table_beside
from mindspeed.megatron_lm.argument_words import ArgumentWords, Count, problem_of_flags
from mindspeed.problems import Fix, Problem

FlagKind = Literal["megatron", "not-needed", "left-out", "refused", "library"]


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Hold flags of one kind with one reason; the fields are those of ``other_flags.yaml``."""

    kind: FlagKind
    flags: dict[str, Count]
    reason: str = ""
    means: str = ""
    fix: str = ""
    only: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """Describe what becomes of the flags, for the table of the guide."""
        texts = {
            "megatron": f"`{self.means}`",
            "not-needed": f"not needed: {self.reason}",
            "left-out": f"skipped: {self.reason}",
            "refused": f"no equivalent: {self.reason}",
            "library": f"belongs to MindSpeed-LLM: {self.reason}",
        }
        return texts[self.kind] + (f" ({' and '.join(self.only)} is accepted)" if self.only else "")


@cache
def flag_groups() -> tuple[FlagGroup, ...]:
    """Read the table."""
    return tuple(FlagGroup(**fields_of(row)) for row in table_beside(__file__))


@cache
def counts() -> dict[str, Count]:
    """Return how many values each flag of the table has."""
    return {flag: count for group in flag_groups() for flag, count in group.flags.items()}


def translate_others(made: ArgumentWords) -> None:
    """Translate the flags of the table and of the rules."""
    for rule in RULES:
        rule.apply(made)
    for group in flag_groups():
        _apply(group, made)


def _apply(group: FlagGroup, made: ArgumentWords) -> None:
    present: dict[str, str] = {}
    for flag, count in group.flags.items():
        if flag in made.known or not made.has(flag):
            continue
        if group.idle and made.value(flag) in group.idle:
            made.take(flag, count)
            continue
        if group.kind == "megatron":
            _put_means(group, flag, count, made)
            continue
        values = made.take(flag, count) or []
        if group.only and set(values) <= set(group.only):
            made.notes.append(f"{flag} {' '.join(values)} is not needed: Megatron already does this")
        else:
            present[flag] = " ".join([flag, *values]) if group.only else flag
    if present:
        _report(group, present, made)


def _put_means(group: FlagGroup, flag: str, count: Count, made: ArgumentWords) -> None:
    own = group.means.split()
    if own[0] not in made.known:
        text = f"{flag} is {group.means} in Megatron-LM, but this version does not have it"
        fix = (Fix.drop_option(flag), Fix.advise("use a Megatron version that has it"))
        made.problems.append(problem_of_flags("MS113", text, [flag], fix))
        made.take(flag, count)
        return
    values = made.replace(flag, count, own) or []
    if "VALUE" in own and not values:
        made.problems.append(problem_of_flags("MS301", f"{flag} has no value", [flag], Fix.advise(f"give {flag} a value")))
    made.notes.append(f"{flag} is translated automatically to Megatron's {group.means.replace('VALUE', ' '.join(values))}")


def _report(group: FlagGroup, present: Mapping[str, str], made: ArgumentWords) -> None:
    flags = ", ".join(present.values())
    are = "are" if len(present) > 1 else "is"
    if group.kind == "not-needed":
        made.notes.append(f"{flags} {are} not needed: {group.reason}")
    elif group.kind == "left-out":
        text = f"{flags} {are} skipped: {group.reason}"
        made.left_out.append(problem_of_flags("MS113", text, present, Fix.drop_option(flags)))
    else:
        belongs = "belongs to MindSpeed-LLM" if group.kind == "library" else "has no equivalent"
        belongs = belongs if len(present) == 1 else belongs.replace("belongs", "belong").replace("has", "have")
        fix = (OTHER_PROGRAM, Fix.drop_option(flags)) if group.kind == "library" else (Fix.drop_option(flags),)
        text = f"{flags} {belongs}: {group.reason}"
        made.problems.append(problem_of_flags("MS113", text, present, Fix.advise(group.fix) if group.fix else fix))


PROGRAMS: Final = frozenset(
    {"posttrain_gpt.py", "pretrain_deepseek4.py", "inference.py", "inference_deepseek4.py", "evaluation.py", "rlhf_gpt.py"}
)
"""Programs of MindSpeed-LLM that Megatron-LM does not have."""


def refused_program(program: str) -> Problem | None:
    """Return MS113 for a program of MindSpeed-LLM."""
    name = Path(program).name
    if name not in PROGRAMS:
        return None
    text = f"{name} belongs to MindSpeed-LLM: Megatron-LM has no such program"
    return Problem("MS113", text, where="command line", fix=(OTHER_PROGRAM, Fix.advise("use a program of Megatron-LM")))
