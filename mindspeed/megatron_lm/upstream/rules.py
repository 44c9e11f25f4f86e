"""What Megatron-LM's own rules say of commands: they run in a child process with limits, and come back as problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.cli_arguments import Surface
from mindspeed.engine.inspection.megatron_copies import package_root, version_of
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.megatron_lm.given_arguments import Given, given_arguments
from mindspeed.plugins.fixes import Advice
from mindspeed.plugins.problems import GivenValue, Problem

TIMEOUT: Final = 120.0
"""Seconds after which the child is ended."""
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
    """Hold what the rules say of one command: problems, what could not be decided, and how many rules there are."""

    problems: tuple[Problem, ...] = ()
    undecided: tuple[str, ...] = ()
    sites: int = 0

    def notes(self, checkout: Checkout) -> Iterator[PlanNote]:
        decided = self.sites - len(self.undecided)
        text = f"{decided} of {self.sites} rules of Megatron-LM {checkout.version or ''} ({checkout.source}) are decided"
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

    A child that does not answer gives every command one problem, MS115, with the reason.
    """
    task = {
        "checkout": str(checkout.folder),
        "facts": _facts_of(arch),
        "commands": [asdict(command) for command in commands],
    }
    try:
        answer = _run(task)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = f"no answer within {TIMEOUT:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return [RulesVerdict((_unread(checkout, reason),)) for _ in commands]
    pairs = zip(commands, answer["results"], strict=True)
    return [_verdict(checkout, result, given_arguments(command.words, known), known) for command, result in pairs]


def _run(task: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a child without site packages. Raises ValueError where it says nothing that can be read."""
    folders = [
        Path(__file__).parents[3],
        *(Path(spec.origin).parents[1] for name in ("packaging", "yaml") if (spec := find_spec(name)) and spec.origin),
    ]
    program = _PROGRAM.format(paths=list(dict.fromkeys(map(str, folders))))
    command = [sys.executable, "-I", "-S", "-B", "-c", program]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ValueError(f"the process ended with status {done.returncode}: {said[0]}") from None
    return answer


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


def _verdict(checkout: Checkout, result: Mapping[str, Any], given: Mapping[str, Given], known: Surface) -> RulesVerdict:
    sites = [site for site in result["sites"] if site["state"] != "not run"]
    problems = [
        _problem(checkout, site, given, known) for site in sorted(sites, key=itemgetter("order")) if site["state"] == "failed"
    ]
    problems += [_unread(checkout, text) for text in result["errors"] if not text.startswith("parser: ")]
    undecided = [_place(checkout, site) for site in sites if site["state"] == "undecided"]
    return RulesVerdict(tuple(dict.fromkeys(problems)), tuple(undecided), len(sites))


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
    if dest in given:
        return GivenValue(given[dest].option, value, "command line", given[dest].option)
    is_default = argument is not None and argument.default == value
    name = argument.options[0] if argument is not None and argument.options else dest
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
    path = Path(site["file"])
    shown = path.relative_to(checkout.folder) if path.is_relative_to(checkout.folder) else path
    return f"{shown}:{site['line']}"
