"""Judge commands by Megatron-LM's own rules, which run in a child process with limits, and return problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.inspection.megatron_copies import package_root, version_of
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.megatron_lm.given_arguments import Given, given_arguments
from mindspeed.plugins.fixes import Advice
from mindspeed.plugins.problems import GivenValue, Problem

SECONDS: Final = 10.0
"""Processor time that the rules may take for one command."""
TIMEOUT: Final = 60.0
"""Seconds after which the child is ended, and a tenth of SECONDS more for each command."""
MAX_CHILDREN: Final = 5
_ARGUMENTS: Final = Path("megatron", "training", "arguments.py")
_PROGRAM: Final = "import sys; sys.path[:0] = {paths!r}; from mindspeed.megatron_lm.upstream.child import main; main()"


@dataclass(frozen=True, slots=True)
class Checkout:
    """Describe a Megatron-LM whose rules are run: its folder, version, and how it was found."""

    folder: Path
    version: str | None
    source: str


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
        text = f"{len(self.decided)} of {sites} rules of Megatron-LM {checkout.version or ''} ({checkout.source}) are decided"
        yield PlanNote("note", "megatron-lm", text)
        if self.undecided:
            yield PlanNote(
                "not-checked", "megatron-lm", f"rules that need a device, a package or a file: {', '.join(self.undecided)}"
            )


def find_checkout(program: str, environ: Mapping[str, str], given: str | None = None) -> Checkout | None:
    """Find the Megatron-LM of a command: the given one, that of its program, that of PYTHONPATH, else the importable one."""
    candidates = [(given, "given")] if given else [(str(parent), program) for parent in Path(program).parents]
    if not given:
        candidates += [(folder, "PYTHONPATH") for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        if (training := package_root("training")) is not None:
            candidates.append((str(training.parent), "importable here"))
    for folder, source in candidates:
        if folder and Path(folder, _ARGUMENTS).is_file():
            return Checkout(Path(folder).absolute(), version_of(Path(folder, "megatron")), source)
    return None


def judge(checkout: Checkout, commands: Sequence[Command], known: Surface, arch: str | None = None) -> list[RulesVerdict]:
    """Run the rules of a checkout on commands.

    A command that ends the child gets one problem, MS115, with the reason; those behind it are asked of another child. After
    MAX_CHILDREN of them the rest gets that problem.
    """
    facts = {"checkout": str(checkout.folder), "facts": _facts_of(arch), "seconds": SECONDS}
    verdicts: list[RulesVerdict] = []
    for _ in range(MAX_CHILDREN):
        rest = [asdict(command) for command in commands[len(verdicts) :]]
        answers, reason = _run({**facts, "commands": rest}, TIMEOUT + SECONDS * len(rest) / 10)
        sites: list[dict[str, Any]] = []
        for answer, command in zip(answers, commands[len(verdicts) :], strict=False):
            sites += answer["sites"]
            verdicts.append(_verdict(checkout, answer, sites, given_arguments(command.words, known), known))
        if len(verdicts) == len(commands):
            return verdicts
        verdicts.append(RulesVerdict((_unread(checkout, reason),)))
    return verdicts + [RulesVerdict((_unread(checkout, reason),)) for _ in commands[len(verdicts) :]]


def _run(task: Mapping[str, Any], timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Ask a child without site packages. Return its answers, and why it gives no more."""
    folders = [
        Path(__file__).parents[3],
        *(Path(spec.origin).parents[1] for name in ("packaging", "yaml") if (spec := find_spec(name)) and spec.origin),
    ]
    program = _PROGRAM.format(paths=list(dict.fromkeys(map(str, folders))))
    command = [sys.executable, "-I", "-S", "-B", "-c", program]
    try:
        done = subprocess.run(command, input=json.dumps(task).encode(), capture_output=True, timeout=timeout, check=False)
    except OSError as error:
        return [], str(error)
    except subprocess.TimeoutExpired as error:
        return _answers(error.stdout or b""), f"no answer within {timeout:.0f} s"
    said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    return _answers(done.stdout), f"the process ended with status {done.returncode}: {said[0]}"


def _answers(output: bytes) -> list[dict[str, Any]]:
    """Read the whole lines of a child, up to one that is no answer."""
    answers = []
    for line in output.splitlines(keepends=True):
        try:
            answer = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            break
        answers.append(answer)
    return answers


def _facts_of(arch: str | None) -> dict[str, Any]:
    """The facts of a device of this compute capability, as ``9.0``."""
    if arch is None:
        return {}
    major, _, minor = arch.partition(".")
    capability = [int(major), int(minor or 0)]
    return {
        "torch.cuda.get_device_capability()": capability,
        "torch.cuda.is_available()": True,
        **{
            f"torch.cuda.get_device_properties().{name}": number
            for name, number in zip(("major", "minor"), capability, strict=True)
        },
    }


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
    text = f"Megatron-LM {checkout.version or ''} refuses this: {site['message'] or site['text']}".replace("  ", " ")
    wanted = [_in_options(one, known) for one in site["wanted"]]
    fix = tuple(map(Advice, wanted)) or Advice(f"make it hold that {site['text']}" if site["text"] else "change these options")
    chain = [f"its rule is {site['text']}"] if site["text"] and site["message"] else []
    return Problem(
        "MS115", text, chain=(*chain, *([values] if values else [])), where=_place(checkout, site), fix=fix, facts=facts
    )


def _fact(dest: str, value: Any, given: Mapping[str, Given], known: Surface) -> GivenValue:
    argument = next(iter(known.by_dest.get(dest, ())), None)
    is_shown = argument is not None and argument.options and argument.action != "store_false"  # whose option means the opposite
    if dest in given:
        return GivenValue(given[dest].option if is_shown else dest, value, "command line", given[dest].option)
    is_default = argument is not None and argument.default == value
    name = argument.options[0] if argument is not None and is_shown else dest
    return GivenValue(name, value, "default" if is_default else "derived")


def _in_options(wanted: str, known: Surface) -> str:
    """``attribute: value`` in the options of the command line."""
    dest, _, value = wanted.partition(": ")
    arguments = [argument for argument in known.by_dest.get(dest, ()) if argument.options]
    for argument in arguments:
        if not argument.takes_value and value in ("on", "off"):
            sets = argument.action != "store_false"
            return argument.options[0] if sets == (value == "on") else f"remove {argument.options[0]}"
    name = arguments[0].options[0] if arguments else dest
    if value in ("other than None", "on"):
        return f"give {name}"
    return f"remove {name}" if value in ("None", "off") else f"{name} {value}"


def _unread(checkout: Checkout, reason: str) -> Problem:
    text = f"the rules of Megatron-LM in {checkout.folder} cannot be run: {reason}"
    return Problem("MS115", text, where=str(checkout.folder / _ARGUMENTS), fix=Advice("check without them: --static"))


def _place(checkout: Checkout, site: Mapping[str, Any]) -> str:
    return f"{_below(checkout.folder, site['file'])}:{site['line']}"


@lru_cache(maxsize=1024)
def _below(folder: Path, file: str) -> str:
    path = Path(file)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
