"""Judge commands by Megatron-LM's own rules, which run in a child process with limits, and return problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.megatron_lm.given_arguments import Given, given_arguments
from mindspeed.problems import Fix, GivenValue, Problem
from mindspeed.workbench.lint.upstream.process import ARGUMENTS, SECONDS, Checkout, RulesProcess

TIMEOUT: Final = 60.0
"""Seconds after which the child is ended, and a tenth of SECONDS more for each command."""
MAX_CHILDREN: Final = 5


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command to judge: its arguments, the number of its processes, and its environment variables."""

    words: Sequence[str]
    world_size: int
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RulesVerdict:
    """Hold what the rules say of one command: problems, and the places of the rules.

    Those that are decided, those that could not be, and those of functions that the command does not call.
    """

    problems: tuple[Problem, ...] = ()
    undecided: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()

    def notes(self, checkout: Checkout) -> Iterator[PlanNote]:
        sites = len(self.decided) + len(self.undecided)
        text = f"{len(self.decided)} of {sites} rules of Megatron-LM {checkout.version or ''} ({checkout.source}) were checked"
        yield PlanNote("note", "megatron-lm", text)
        if self.undecided:
            text = f"rules that need a device, a package or a file: {', '.join(self.undecided)}"
            yield PlanNote("not-checked", "megatron-lm", text)


class Judging:
    """Commands that the rules of a checkout judge while this process does something else, in ``child`` where there is one.

    A command that ends the child gets one problem, MS115, with the reason; those behind it are sent to another child. After
    MAX_CHILDREN of them the rest gets that problem.
    """

    def __init__(
        self,
        checkout: Checkout,
        commands: Sequence[Command],
        known: Surface,
        arch: str | None = None,
        child: RulesProcess | None = None,
    ) -> None:
        self._checkout, self._commands, self._known, self._arch = checkout, commands, known, arch
        self._child = self._sent(commands, child)

    def verdicts(self) -> list[RulesVerdict]:
        """Wait for what the rules say of each command."""
        found: list[RulesVerdict] = []
        for number in range(MAX_CHILDREN):
            rest = self._commands[len(found) :]
            answers, reason = (self._sent(rest) if number else self._child).answers()
            sites: list[dict[str, Any]] = []
            for answer, command in zip(answers, rest, strict=False):
                sites += answer["sites"]
                given = given_arguments(command.words, self._known)
                found.append(_verdict(self._checkout, answer, sites, given, self._known))
            if len(found) == len(self._commands):
                return found
            found.append(RulesVerdict((_unread(self._checkout, reason),)))
        return found + [RulesVerdict((_unread(self._checkout, reason),)) for _ in self._commands[len(found) :]]

    def _sent(self, commands: Sequence[Command], child: RulesProcess | None = None) -> RulesProcess:
        child = child or RulesProcess(self._checkout.folder, self._arch)
        child.send(list(map(asdict, commands)), TIMEOUT + SECONDS * len(commands) / 10)
        return child


def judge(checkout: Checkout, commands: Sequence[Command], known: Surface, arch: str | None = None) -> list[RulesVerdict]:
    """Run the rules of a checkout on commands, and wait for their verdicts."""
    return Judging(checkout, commands, known, arch).verdicts()


def _verdict(
    checkout: Checkout,
    answer: Mapping[str, Any],
    sites: Sequence[Mapping[str, Any]],
    given: Mapping[str, Given],
    known: Surface,
) -> RulesVerdict:
    problems = [_problem(checkout, {**sites[failed["site"]], **failed}, given, known) for failed in answer["failed"]]
    problems += [_unread(checkout, text) for text in answer["errors"] if not text.startswith("parser: ")]
    undecided = [number for number, _ in answer["undecided"]]
    decided = [*answer["held"], *(failed["site"] for failed in answer["failed"])]
    unreached = sorted(set(range(len(sites))) - {*decided, *undecided})
    places = (tuple(_place(checkout, sites[number]) for number in group) for group in (undecided, decided, unreached))
    return RulesVerdict(tuple(dict.fromkeys(problems)), *places)


def _problem(checkout: Checkout, site: Mapping[str, Any], given: Mapping[str, Given], known: Surface) -> Problem:
    facts = tuple(_fact(dest, value, given, known) for dest, value in site["values"].items())
    values = ", ".join(f"{fact.name} is {fact.value} ({fact.source})" for fact in facts)
    text = f"Megatron-LM {checkout.version or ''} refuses this command: {site['message'] or site['text']}".replace("  ", " ")
    wanted = tuple(_way(dest, relation, value, known) for dest, relation, value in site["wanted"])
    change = f"change the options so that {site['text']}" if site["text"] else "change these options"
    rule = f"its rule is {site['text']}" if site["text"] and site["message"] else ""
    chain = tuple(filter(None, (rule, values)))
    return Problem("MS115", text, chain=chain, where=_place(checkout, site), fix=wanted or Fix.advise(change), facts=facts)


def _fact(dest: str, value: Any, given: Mapping[str, Given], known: Surface) -> GivenValue:
    argument = next(iter(known.by_dest.get(dest, ())), None)
    is_shown = argument is not None and argument.options and argument.action != "store_false"  # whose option means the opposite
    if dest in given:
        return GivenValue(given[dest].option if is_shown else dest, value, "command line", given[dest].option)
    is_default = argument is not None and argument.default == value
    name = argument.options[0] if argument is not None and is_shown else dest
    return GivenValue(name, value, "default" if is_default else "derived")


def _way(dest: str, relation: str, value: str, known: Surface) -> Fix:
    """Return how the options of the command line give an attribute a value, or one that relates to it."""
    arguments = [argument for argument in known.by_dest.get(dest, ()) if argument.options]
    for argument in arguments:
        if not argument.takes_value and value in ("on", "off"):
            is_given = (argument.action != "store_false") == (value == "on")
            return (Fix.give_option if is_given else Fix.drop_option)(argument.options[0])
    name = arguments[0].options[0] if arguments else dest
    if value == "on" or (relation and value == "None"):
        return Fix.give_option(name, None)
    if relation:
        return Fix.give_option(name, None, f"{relation} {value}")
    return Fix.drop_option(name) if value in ("None", "off") else Fix.give_option(name, value)


def _unread(checkout: Checkout, reason: str) -> Problem:
    text = f"the rules of Megatron-LM in {checkout.folder} cannot be run: {reason}"
    return Problem("MS115", text, where=str(checkout.folder / ARGUMENTS), fix=Fix.advise("check without them: --static"))


def _place(checkout: Checkout, site: Mapping[str, Any]) -> str:
    return f"{_below(checkout.folder, site['file'])}:{site['line']}"


@lru_cache(maxsize=1024)
def _below(folder: Path, file: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
