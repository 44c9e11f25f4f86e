"""``mindspeed check``: every problem of training commands, in words, in scripts and in folders, before anything is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from gettext import gettext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed._version import __version__
from mindspeed.cli.feature_check import device_memory_option, plan_of_job, require_memory
from mindspeed.cli.language import reader
from mindspeed.cli.output import end, exit_code, json_option, print_json, wants_json
from mindspeed.cli.request_options import Request, request_options
from mindspeed.cli.training_command import WORDS, PlansCommands, RuleOptions, plans_of_launched, rules_options
from mindspeed.problems import CommandLine, Text, localized, on_command_line

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.problems import MindSpeedError, Problem
    from mindspeed.workbench.lint.launched_command import LaunchedCommand
    from mindspeed.workbench.lint.traps import Trap

_FORMATS: Final = ("text", "github", "sarif")
_SARIF: Final = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True, slots=True)
class CheckedCommand:
    """Hold the result of checking one command: its place, problems, plan, and the rules that it was checked by."""

    file: str
    line: int
    program: str
    problems: tuple[Problem, ...] = ()
    places: tuple[tuple[str, int], ...] = ()
    words: CommandLine = on_command_line
    plan: ActivationPlan | None = None
    traps: tuple[Trap, ...] = ()
    judge: str = ""
    command: LaunchedCommand | None = None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@click.command(cls=PlansCommands)
@click.argument("paths", metavar="[SCRIPT|FOLDER]...", nargs=-1)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="text",
    help="Output format. github = annotations of GitHub Actions, sarif = code scanning",
)
@click.option(
    "--start",
    "starts",
    is_flag=True,
    help="Also start each job up to the end of its first step: one process per distinct rank, no device and no data",
)
@click.option("--plan", "with_plan", is_flag=True, help="Also print the plan of each command without problems")
@device_memory_option
@rules_options
@request_options
@json_option
def check(
    request: Request,
    paths: tuple[str, ...],
    form: str,
    starts: bool,
    with_plan: bool,
    device_memory: int | None,
    rules: RuleOptions,
) -> None:
    """Find every problem of training commands before they start.

    mindspeed check pretrain.sh

    mindspeed check scripts/ --format github

    mindspeed check -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 ...

    mindspeed check -f job.yaml

    The commands come from shell scripts, from JSON files with a program and its args (launch.json), or from a folder of
    these. Each command is checked by the rules of its Megatron-LM and of its features. The exit status is 1 when a command
    has problems. With --start, what only a rank would refuse is a problem too.
    """
    checked = [_with_memory(one, device_memory) for one in _checked(request, paths, rules)]
    if starts:
        checked = _started(checked, request, rules)
    if wants_json():
        problems = [problem.to_json(one.words) for one in checked for problem in one.problems]
        commands, traps = list(map(_as_json, checked)), _traps_as_json(checked)
        print_json({"commands": commands, "problems": problems, "traps": traps, "plan": None})
    elif form == "text":
        _print(checked, with_plan)
    else:
        click.echo(_github(checked) if form == "github" else _sarif(checked), nl=form == "sarif")
    end(exit_code([problem for one in checked for problem in one.problems]))


def _checked(request: Request, paths: tuple[str, ...], rules: RuleOptions) -> list[CheckedCommand]:
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.lint.launched_command import command_of_words, commands_of_file

    words: list[str] | None = click.get_current_context().meta.get(WORDS)
    found: list[LaunchedCommand | CheckedCommand] = []
    if words is not None:
        found.append(command_of_words(words))
    for file in _files(paths):
        try:
            found += commands_of_file(file, os.environ)
        except MindSpeedError as error:
            found.append(CheckedCommand(file, 0, "", tuple(error.problems)))
    if not paths and words is None:
        return [_planned(request)]
    found = list(dict.fromkeys(found))  # a script of a folder may be called by another one
    commands = [one for one in found if not isinstance(one, CheckedCommand)]
    plans = iter(plans_of_launched(request, commands, rules))
    return [one if isinstance(one, CheckedCommand) else _of_command(one, *next(plans)) for one in found]


def _files(paths: tuple[str, ...]) -> list[str]:
    """The scripts among some paths and below them."""
    folders = {path: sorted(map(str, Path(path).rglob("*.sh"))) for path in paths if os.path.isdir(path)}
    return [file for path in paths for file in folders.get(path, [path])]


def _of_command(
    command: LaunchedCommand, plan: ActivationPlan | MindSpeedError, traps: list[Trap], judge: str
) -> CheckedCommand:
    from mindspeed.megatron_lm.command_line_fixes import MegatronCommandLine
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.lint.traps import STOPS

    passing = tuple(trap for trap in traps if trap.consequence != STOPS)
    place = (command.source, command.line, command.program)
    if not isinstance(plan, MindSpeedError):
        words = MegatronCommandLine(plan.environment.get("megatron"))
        return CheckedCommand(*place, words=words, plan=plan, traps=passing, judge=judge, command=command)
    options = ([fact.option for fact in problem.facts if fact.option] for problem in plan.problems)
    places = tuple(next(filter(None, map(command.place_of, given)), place[:2]) for given in options)
    return CheckedCommand(*place, plan.problems, places, plan.words, traps=passing, judge=judge)


def _with_memory(one: CheckedCommand, device_memory: int | None) -> CheckedCommand:
    """Add the stages that need more memory than a device has to the problems of a command."""
    from mindspeed.problems import MindSpeedError

    try:
        if one.plan is not None:
            require_memory(one.plan, device_memory)
    except MindSpeedError as error:
        return replace(one, problems=error.problems, plan=None)
    return one


def _started(checked: list[CheckedCommand], request: Request, rules: RuleOptions) -> list[CheckedCommand]:
    """Add what a rank refuses at its start to the problems of the jobs that have none, and print each as it ends."""
    from mindspeed.cli.check_start import Starts
    from mindspeed.problems.problem import MindSpeedError
    from mindspeed.workbench.lint.upstream.process import find_checkout

    found = []
    with Starts(request) as starts:
        for one in checked:
            if one.plan is None:
                found.append(one)
                continue
            if sys.stderr.isatty():
                click.echo(f"starting {one.place}", err=True)
            program = one.command.program if one.command is not None else ""
            checkout = find_checkout(program, os.environ, rules.checkout)
            try:
                plan = starts.of(one.plan, one.command, checkout)
                ending = gettext("started") if plan is one.plan else gettext("not started")
                found.append(replace(one, plan=plan))
            except MindSpeedError as error:
                ending = _count(error.problems)
                found.append(replace(one, problems=error.problems, plan=None))
            click.echo(f"{one.place}: {ending}", err=True)
    return found


def _count(problems: Sequence[Problem]) -> str:
    return gettext("1 problem") if len(problems) == 1 else gettext("{count} problems").format(count=len(problems))


def _planned(request: Request) -> CheckedCommand:
    """Check a job file, or the job that options describe."""
    from mindspeed.problems import MindSpeedError

    try:
        return CheckedCommand(request.layers[0].source, 0, "job", plan=plan_of_job(request))
    except MindSpeedError as error:
        return CheckedCommand(request.layers[0].source, 0, "job", tuple(error.problems), words=error.words)


def _print(checked: list[CheckedCommand], with_plan: bool) -> None:
    """Print who judges, then problems, traps and warnings with the commands that have them, then a line for each command."""
    from mindspeed.cli.plan_text import brief_lines, verdict

    for judge in dict.fromkeys(one.judge for one in checked if one.judge):
        click.echo(gettext("checked by {judge}").format(judge=judge))
    for text in dict.fromkeys(problem.text(reader(one.words)) for one in checked for problem in one.problems):
        click.echo(text)
    for trap, places in places_of_traps(checked).items():
        click.echo(f"{trap}\n  {gettext('in: {places}').format(places=', '.join(places))}")
    notes: dict[str, list[str]] = {}
    for one in checked:
        for line in _notes(one):
            notes.setdefault(line, []).append(one.place)
    for line, places in notes.items():
        click.echo(f"{line}\n  {gettext('in: {places}').format(places=', '.join(places))}")
    for one in checked:
        click.echo(f"{one.place}: {verdict(one.plan) if one.plan else _count(one.problems)}")
        for line in brief_lines(one.plan, one.words) if with_plan and one.plan else ():
            click.echo(line)
    if not checked:
        click.echo(gettext("no training commands found"))


def _notes(one: CheckedCommand) -> Iterator[str]:
    """The warnings of a command, what is prepared before it and what is not checked of it, beside its traps."""
    if one.plan is None:
        return
    from mindspeed.cli.plan_text import unknown_lines

    noted = {trap.note for trap in one.traps}
    warnings = [row for row in one.plan.rows if row.kind == "warning" and row not in noted]
    yield from (
        gettext("warning: {text}").format(text=localized(Text.of("{name}: {text}", name=row.feature, text=row.text)))
        for row in warnings
    )
    prepared = (row for row in one.plan.rows if row.kind == "prepared-first")
    yield from (gettext("prepared first: {text}").format(text=localized(row.text)) for row in prepared)
    yield from (gettext("not checked: {text}").format(text=line) for line in unknown_lines(one.plan.rows, one.words))


def places_of_traps(checked: list[CheckedCommand]) -> dict[Trap, list[str]]:
    """Every trap with the commands that fall into it, the worst first."""
    from mindspeed.workbench.lint.traps import CONSEQUENCES

    places: dict[Trap, list[str]] = {}
    for one in checked:
        for trap in one.traps:
            places.setdefault(trap, []).append(one.place)
    return dict(sorted(places.items(), key=lambda item: CONSEQUENCES.index(item[0].consequence)))


def _traps_as_json(checked: list[CheckedCommand]) -> list[dict[str, object]]:
    names = ("name", "consequence", "text", "fix", "source")
    found = places_of_traps(checked).items()
    return [{name: getattr(trap, name) for name in names} | {"commands": places} for trap, places in found]


def _as_json(one: CheckedCommand) -> dict[str, object]:
    facts = {name: getattr(one, name) for name in ("file", "line", "program", "judge")}
    return facts | {"problems": len(one.problems), "plan": one.plan}


def _located(checked: list[CheckedCommand]) -> Iterator[tuple[CheckedCommand, Problem, tuple[str, int]]]:
    for one in checked:
        places = one.places or ((one.file, one.line),) * len(one.problems)
        yield from ((one, problem, place) for problem, place in zip(one.problems, places, strict=True))


def _text(one: CheckedCommand, problem: Problem) -> str:
    fix = one.words(problem.fix) if one.words else problem.fix_text
    return "\n".join([problem.message, *problem.chain, *([f"fix: {fix}"] if fix else [])])


def _github(checked: list[CheckedCommand]) -> str:
    """Write one workflow command ``::error`` for each problem, ``::warning`` or ``::notice`` for each trap."""
    errors = [("error", place, problem.code, _text(one, problem)) for one, problem, place in _located(checked)]
    traps = [
        (_LEVELS.get(trap.consequence, "warning"), (one.file, one.line), trap.name, str(trap)) for one, trap in _traps(checked)
    ]
    return "".join(
        f"::{level} file={_escaped(file, ':,')},line={line or 1},title={title}::{_escaped(text)}\n"
        for level, (file, line), title, text in (*errors, *traps)
    )


_LEVELS = {"note": "notice"}


def _traps(checked: list[CheckedCommand]) -> Iterator[tuple[CheckedCommand, Trap]]:
    yield from ((one, trap) for one in checked for trap in one.traps)


def _escaped(text: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _sarif(checked: list[CheckedCommand]) -> str:
    """A log of SARIF 2.1.0 with one run."""
    from mindspeed.problems import error_codes

    results = [_result(problem.code, "error", _text(one, problem), place) for one, problem, place in _located(checked)]
    for one, trap in _traps(checked):
        level = "note" if trap.consequence == "note" else "warning"
        results.append(_result(trap.name, level, str(trap), (one.file, one.line)))
    described = {problem.code: error_codes()[problem.code] for _, problem, _ in _located(checked)}
    described |= {trap.name: trap.text for _, trap in _traps(checked)}
    rules = [{"id": name, "fullDescription": {"text": text}} for name, text in sorted(described.items())]
    driver = {"name": "mindspeed", "version": __version__, "rules": rules}
    log = {"$schema": _SARIF, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2)


def _result(rule: str, level: str, text: str, place: tuple[str, int]) -> dict[str, Any]:
    file, line = place
    location = {"physicalLocation": {"artifactLocation": {"uri": file}, "region": {"startLine": line or 1}}}
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [location]}
