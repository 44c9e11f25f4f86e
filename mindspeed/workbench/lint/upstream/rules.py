"""Judge commands by Megatron-LM's own rules, which run in a child process with limits, and return problems."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.job.fact import Names
from mindspeed.job.fields import FIELDS
from mindspeed.job.megatron_arguments import PutValue, target_of
from mindspeed.megatron.hook_points import MegatronHookPoints
from mindspeed.megatron_lm.argument_words import whole_number
from mindspeed.megatron_lm.given_arguments import Given, given_arguments
from mindspeed.plugins.patches import Wrap
from mindspeed.problems import Fix, GivenValue, Problem
from mindspeed.workbench.lint.upstream.derived_names import DerivedNames, derived_names
from mindspeed.workbench.lint.upstream.mending import NEEDED, Places, Refused, mended
from mindspeed.workbench.lint.upstream.process import ARGUMENTS, SECONDS, Checkout, RulesProcess

TIMEOUT: Final = 60.0
"""Seconds after which the child is ended, and a tenth of SECONDS more for each command."""
MAX_CHILDREN: Final = 5


@dataclass(frozen=True, slots=True)
class Command:
    """Describe a command to judge: its arguments, the number of its processes, and its environment variables.

    With a plan, its changes are made before the rules are asked, as its ranks make them. ``unknown`` are arguments by dest
    whose values nothing here knows: rules that read them are undecided.
    """

    words: Sequence[str]
    world_size: int
    environ: Mapping[str, str] = field(default_factory=dict)
    plan: ActivationPlan | None = None
    unknown: Collection[str] = ()

    def task(self, known: Surface) -> dict[str, Any]:
        """Return the command for the child process."""
        overrides = [planned.override for planned in self.plan.overrides] if self.plan is not None else []
        given = {dest: argument.value for dest, argument in given_arguments(self.words, known).items()}
        dests = {target_of(override.argument, given).dest for override in overrides}
        return {
            "words": list(self.words),
            "world_size": self.world_size,
            "environ": dict(self.environ),
            "platform": self.plan.world.known().get("platform") if self.plan is not None else None,
            "overrides": {override.argument: override.value for override in overrides},
            "of_configurations": {override.argument: override.value for override in overrides if override.only is None},
            "defaults": {dest: known.by_dest[dest][0].default for dest in dests if dest in known.by_dest},
            "unknown": sorted(self.unknown),
            "wraps": list(_wraps_of_rules(self.plan)) if self.plan is not None else [],
        }


VALIDATIONS: Final = (
    "megatron.training.arguments:validate_args",
    "megatron.training.yaml_arguments:validate_yaml",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
)
"""Functions of Megatron with rules, whose wrappers are called without torch."""


def _wraps_of_rules(plan: ActivationPlan) -> Iterator[tuple[str, str]]:
    """Yield target and wrapper of the patches with which features accept arguments that Megatron's validation refuses."""
    for planned in plan.patches:
        wraps = isinstance(planned.patch, Wrap) and not planned.skipped and planned.owner != MegatronHookPoints.spec.name
        if wraps and planned.patch.target in VALIDATIONS:
            yield planned.patch.target, str(planned.patch.value)


@dataclass(frozen=True, slots=True)
class RulesVerdict:
    """Hold what the rules say of one command: what they refuse, and the places of the rules.

    Those that are decided, those that could not be, and those of functions that the command does not call. ``refused`` are
    values of the plan that the parsed arguments contradict, ``job`` fields of the job that the validated ones give, with what
    decides each. ``at_start`` are the places of refusals by code that gets the validated arguments. ``unjudged`` is why the
    rules could not be asked here, as they can on a rank, ``unread`` that they cannot be run at all.
    """

    refusals: tuple[Problem, ...] = ()
    undecided: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    refused: Mapping[str, PutValue] = field(default_factory=dict)
    job: Mapping[str, tuple[Any, Names]] = field(default_factory=dict)
    at_start: tuple[str, ...] = ()
    unjudged: str = ""
    unread: tuple[Problem, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems: what the rules refuse, and that they cannot be run."""
        return self.refusals + self.unread

    def notes(self, checkout: Checkout) -> Iterator[PlanNote]:
        if self.unjudged:
            yield PlanNote("not-checked", "megatron-lm", f"the rules of Megatron-LM: {self.unjudged}")
            return
        sites = len(self.decided) + len(self.undecided)
        text = f"{len(self.decided)} of {sites} rules of Megatron-LM {checkout.version or ''} ({checkout.source}) were checked"
        yield PlanNote("note", "megatron-lm", text)
        if self.undecided:
            text = f"rules that need a device, a package or a file: {', '.join(self.undecided)}"
            yield PlanNote("not-checked", "megatron-lm", text)


def judge(
    checkout: Checkout,
    commands: Sequence[Command],
    known: Surface,
    arch: str | None = None,
    child: RulesProcess | None = None,
) -> list[RulesVerdict]:
    """Run the rules of a checkout on commands, in ``child`` where there is one, and return what they say of each.

    A command that ends the child gets one problem, MS115, with the reason; those behind it are sent to another child. After
    MAX_CHILDREN of them the rest gets that problem.
    """
    tasks = [command.task(known) for command in commands]
    answers = _answers(checkout, tasks, arch, child)
    derived = derived_names(checkout.folder)
    found = [
        _verdict(checkout, *answer, given_arguments(task["words"], known), known, derived)
        if isinstance(answer, tuple)
        else RulesVerdict(unread=(_unread(checkout, answer),))
        for answer, task in zip(answers, tasks, strict=True)
    ]
    return _with_fixes_that_mend(checkout, found, answers, tasks, known, arch)


_Answer = tuple[dict[str, Any], list[dict[str, Any]]]
"""The answer of the child for a command, and the sites that it has met until then."""


def _answers(
    checkout: Checkout, tasks: Sequence[dict[str, Any]], arch: str | None, child: RulesProcess | None = None
) -> list[_Answer | str]:
    """Return what the rules say of each task, or why they say nothing."""
    found: list[_Answer | str] = []
    reason = ""
    for number in range(MAX_CHILDREN):
        rest = tasks[len(found) :]
        process = child if child is not None and not number else RulesProcess(checkout.folder, arch)
        answers, reason = process.answers(rest, TIMEOUT + SECONDS * len(rest) / 10)
        sites: list[dict[str, Any]] = []
        for answer in answers[: len(rest)]:
            sites += answer["sites"]
            found.append((answer, list(sites)))
        if len(found) == len(tasks):
            return found
        found.append(reason)
    return found + [reason] * (len(tasks) - len(found))


def _with_fixes_that_mend(
    checkout: Checkout,
    verdicts: Sequence[RulesVerdict],
    answers: Sequence[_Answer | str],
    tasks: Sequence[dict[str, Any]],
    known: Surface,
    arch: str | None,
) -> list[RulesVerdict]:
    """Return verdicts whose problems have the fixes that mend them, as the rules say of the commands with these fixes."""
    refused = {
        number: Refused(task, _places(checkout, answer), verdict.refusals)
        for number, (verdict, answer, task) in enumerate(zip(verdicts, answers, tasks, strict=True))
        if verdict.refusals and isinstance(answer, tuple)
    }
    if not refused:
        return list(verdicts)

    def trials(changed: Sequence[Mapping[str, Any]]) -> list[Places | None]:
        return [
            _places(checkout, answer) if isinstance(answer, tuple) and not _is_unread(answer[0]) else None
            for answer in _answers(checkout, list(map(dict, changed)), arch)
        ]

    fixed = dict(zip(refused, mended(list(refused.values()), known, derived_names(checkout.folder), trials), strict=True))
    return [replace(verdict, refusals=tuple(fixed.get(number, verdict.refusals))) for number, verdict in enumerate(verdicts)]


def _is_unread(answer: Mapping[str, Any]) -> bool:
    """Return whether the parser refuses a command, so that no rule of the validation judges it."""
    return any(error.startswith("parser: ") for error in answer["errors"])


def _places(checkout: Checkout, answer: _Answer) -> Places:
    return frozenset(_place(checkout, answer[1][failed["site"]]) for failed in answer[0]["failed"])


def _verdict(
    checkout: Checkout,
    answer: Mapping[str, Any],
    sites: Sequence[Mapping[str, Any]],
    given: Mapping[str, Given],
    known: Surface,
    derived: DerivedNames,
) -> RulesVerdict:
    failures = [{**sites[failed["site"]], **failed} for failed in _separate(answer["failed"], known, derived)]
    problems = [_problem(checkout, failed, given, known, derived) for failed in failures]
    at_start = tuple(_place(checkout, failed) for failed in failures if failed["at_start"])
    unread = tuple(_unread(checkout, text) for text in dict.fromkeys(answer["errors"]) if not text.startswith("parser: "))
    undecided = [number for number, _ in answer["undecided"]]
    decided = [*answer["held"], *(failed["site"] for failed in answer["failed"])]
    unreached = sorted(set(range(len(sites))) - {*decided, *undecided})
    groups = [tuple(_place(checkout, sites[number]) for number in group) for group in (undecided, decided, unreached)]
    refused = {argument: PutValue(**one) for argument, one in answer["refused"].items()}
    job = {name: (FIELDS[name].typed(value), tuple(dests)) for name, (value, dests) in answer["job"].items()}
    refusals = tuple(_one_each(problems))
    return RulesVerdict(refusals, groups[0], groups[1], groups[2], refused, job, at_start, answer["unjudged"], unread)


def _separate(failed: Sequence[Mapping[str, Any]], known: Surface, derived: DerivedNames) -> list[Mapping[str, Any]]:
    """Return failures without those of the start with a value of which a rule refuses all that decides it."""
    options = _with_options(known)
    refused = [one["values"].keys() for one in failed if not one["at_start"]]

    def follows(name: str) -> bool:
        decides = {name} if name in options else {*derived.sources(name, options)}
        return bool(decides) and any(decides <= names for names in refused)

    return [one for one in failed if not (one["at_start"] and any(map(follows, one["values"])))]


def _problem(
    checkout: Checkout, site: Mapping[str, Any], given: Mapping[str, Given], known: Surface, derived: DerivedNames
) -> Problem:
    """Return what a rule refuses, in the options of the command line. Its fixes are not tried yet."""
    facts = tuple(_fact(dest, value, given, known, derived) for dest, value in site["values"].items())
    values = ", ".join(f"{fact.name} is {fact.value} ({fact.source})" for fact in facts)
    text = f"Megatron-LM {checkout.version or ''} refuses this command: {site['message'] or site['text']}".replace("  ", " ")
    ways = (_way(wanted, given, known, derived) for wanted in site["wanted"])
    wanted = tuple(way for way in ways if way is not None)
    if not site["wanted"] or any(way.verb == "run-command" for way in wanted):
        wanted += tuple(Fix.drop_option(fact.option) for fact in facts if fact.option)
    change = f"change the options so that {site['text']}" if site["text"] else "read the rule, and change what it refuses"
    rule = f"its rule is {site['text']}" if site["text"] and site["message"] else ""
    chain = tuple(filter(None, (rule, values)))
    fix, where = wanted or Fix.advise(change), _place(checkout, site)
    return Problem("MS115", text, chain=chain, where=where, fix=fix, facts=facts, rule=site["text"])


def _one_each(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Yield one problem for rules that refuse the same values, or some of them, and that the same changes mend."""
    found = list(dict.fromkeys(problems))
    also: dict[Problem, list[str]] = {}
    for problem in sorted(found, key=lambda one: (-len(one.facts), -len(one.fix))):
        widest = next((other for other in also if _is_covered(problem, other)), None)
        if widest is None:
            also[problem] = []
        else:
            also[widest].append(f"also refused at {problem.where}")
    yield from (replace(problem, chain=(*problem.chain, *also[problem])) for problem in found if problem in also)


def _is_covered(problem: Problem, other: Problem) -> bool:
    """Return whether all values that a rule refuses, and all changes that mend it, are among those of another one."""
    values, others = ({(fact.name, str(fact.value)) for fact in one.facts} for one in (problem, other))
    return bool(values) and values <= others and set(problem.fix) <= set(other.fix)


def _fact(attribute: str, value: Any, given: Mapping[str, Given], known: Surface, derived: DerivedNames) -> GivenValue:
    dest = _dest(attribute, known, derived)
    argument = next(iter(known.by_dest.get(dest, ())), None)
    is_shown = argument is not None and argument.options and argument.action != "store_false"  # whose option means the opposite
    if dest in given:
        return GivenValue(given[dest].option if is_shown else dest, value, "command line", given[dest].option)
    is_default = argument is not None and argument.default == value
    name = argument.options[0] if argument is not None and is_shown else dest
    return GivenValue(name, value, "default" if is_default else _derivation(dest, given, known, derived))


def _derivation(attribute: str, given: Mapping[str, Given], known: Surface, derived: DerivedNames) -> str:
    """Return how an attribute gets its value: by which options of the command line, as far as that is known."""
    dests = derived.sources(attribute, _with_options(known)) if attribute not in _with_options(known) else []
    options = [given[dest].option for dest in dests if dest in given]
    return f"derived from {', '.join(options)}" if options else "derived"


def _dest(attribute: str, known: Surface, derived: DerivedNames) -> str:
    """Return the argument that an attribute is a copy of, or the attribute itself."""
    options = _with_options(known)
    copied = derived.copies.get(attribute, "") if attribute not in options else ""
    return copied if copied in options else attribute


@lru_cache(maxsize=8)
def _with_options(known: Surface) -> frozenset[str]:
    """The dests of arguments that a user can type."""
    return frozenset(argument.dest for argument in known.arguments if argument.options)


def _way(wanted: Sequence[str], given: Mapping[str, Given], known: Surface, derived: DerivedNames) -> Fix | None:
    """Return how the options of the command line, or a variable, get a value or one that relates to it; None if none does."""
    attribute, relation, value = wanted
    if attribute.startswith("$"):
        return _way_of_variable(attribute[1:], relation, value)
    dest = _dest(attribute, known, derived)
    arguments = [argument for argument in known.by_dest.get(dest, ()) if argument.options]
    for argument in arguments:
        if not argument.takes_value and value in ("on", "off"):
            is_given = (argument.action != "store_false") == (value == "on")
            return (Fix.give_option if is_given else Fix.drop_option)(argument.options[0])
    if not arguments:
        return None
    name = arguments[0].options[0]
    if value == "on" or (relation and value == "None"):
        return Fix.give_option(name, None)
    if relation:
        present = given[dest].value if dest in given else arguments[0].default
        return Fix.give_option(name, None, f"{relation} {value}", _example(relation, value, present))
    if value in ("None", "off"):
        return Fix.drop_option(name) if dest not in NEEDED else None
    return Fix.give_option(name, value)


def _example(relation: str, limit: str, present: Any) -> str | None:
    """Return a value that relates to a limit, near the present one; None where none is known."""
    if relation == "one of":
        return limit.split(", ")[0]
    number = whole_number(limit)
    if number is None:
        return limit if relation in ("at most", "at least") else None
    if relation == "a multiple of":
        now = present if isinstance(present, int) else 1
        return str(-(-max(now, 1) // number) * number) if number > 0 else None
    return str(number + _BEYOND[relation])


_BEYOND: Final = {"at most": 0, "at least": 0, "more than": 1, "less than": -1, "other than": 1}
"""The number that is added to a limit for a value that relates to it."""


def _way_of_variable(name: str, relation: str, value: str) -> Fix | None:
    if (relation, value) == ("other than", "None"):
        return None
    return Fix.run_command(f"unset {name}" if relation == "other than" or value == "None" else f"export {name}={value}")


def _unread(checkout: Checkout, reason: str) -> Problem:
    text = f"the rules of Megatron-LM in {checkout.folder} cannot be run: {reason}"
    return Problem("MS115", text, where=str(checkout.folder / ARGUMENTS), fix=Fix.advise("check without them: --static"))


def _place(checkout: Checkout, site: Mapping[str, Any]) -> str:
    return f"{_below(checkout.folder, site['file'])}:{site['line']}"


@lru_cache(maxsize=1024)
def _below(folder: Path, file: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
