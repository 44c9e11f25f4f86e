"""Find the training command of a launch: words, a shell script, or a launcher's JSON. Nothing is run, nothing is imported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from mindspeed.megatron_lm.argument_words import whole_number
from mindspeed.problems import Fix, Problem, ResolutionError, advice
from mindspeed.workbench.lint.shell_script import SHELLS, ShellCommand, Word, shell_commands
from mindspeed.workbench.lint.shell_words import MAX_CHARACTERS, ShellLimit

COMMAND_LINE: Final = "command line"
_TRAINS: Final = frozenset({"--micro-batch-size", "--train-iters", "--train-samples", "--yaml-cfg", "--use-checkpoint-args"})
"""Arguments of which every run of Megatron-LM's training loop has at least one."""
_PER_NODE: Final = ("--nproc_per_node", "--nproc-per-node", "--nproc", "--num_gpus", "--local_worker_num")
_NODES: Final = ("--nnodes", "--num_nodes")
_PROCESSES: Final = ("--worker_num", "--num_processes", "--num-processes", "-np")


@dataclass(frozen=True, slots=True)
class LaunchedCommand:
    """Describe a training command: its program, its arguments with their lines, and the number of processes of its launcher.

    ``source`` is the file that its program stands in, or ``command line``, and ``line`` the line. ``script`` is the file that
    was given, which may have called or sourced that one; ``others`` are the places of its other commands. ``world_size`` is
    None where the launch does not say it. ``launcher`` is the name of the program that starts the processes, if there is one.
    """

    program: str
    arguments: tuple[Word, ...]
    world_size: int | None = None
    source: str = COMMAND_LINE
    unset: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    line: int = 0
    launcher: str = ""
    script: str = field(default=COMMAND_LINE, compare=False)

    def place_of(self, flag: str) -> tuple[str, int] | None:
        """The file and the line of the last occurrence of an option; None when it is missing, or there are no lines."""
        words = [word for word in self.arguments if word.text.partition("=")[0] == flag and word.line]
        return (words[-1].file or self.source, words[-1].line) if words else None

    def starts_a_missing_file(self) -> bool:
        """Return whether these are words whose program is a path of a Python file that does not exist."""
        return self.source == COMMAND_LINE and self.program.endswith(".py") and not Path(self.program).is_file()


def command_of_words(words: Sequence[str]) -> LaunchedCommand:
    """The training command among words, with or without its launcher, or of the script that a shell gets with its arguments."""
    if len(words) > 1 and words[0].rpartition("/")[2] in SHELLS and not words[1].startswith("-"):
        return _only(iter(commands_of_file(words[1], os.environ, words[2:])), words[1])
    return _only(_trainings([ShellCommand(tuple(Word(text, 0) for text in words))], COMMAND_LINE, strict=False), COMMAND_LINE)


def command_of_file(path: str | Path, environ: Mapping[str, str]) -> LaunchedCommand:
    """The training command of a shell script, or of a JSON file of a launcher. Raises ResolutionError with MS305 or MS301."""
    return _only(iter(commands_of_file(path, environ)), str(path))


def commands_of_file(path: str | Path, environ: Mapping[str, str], arguments: Sequence[str] = ()) -> list[LaunchedCommand]:
    """Every training command of such a file, which is none for one without a program or without training arguments."""
    try:
        if not Path(path).is_file():
            raise ResolutionError([_unreadable(str(path), "it is not a file")])
        if str(path).endswith(".py"):
            raise ResolutionError([_program(str(path))])
        if str(path).endswith((".yaml", ".yml")):
            raise ResolutionError([_job_file(str(path))])
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CHARACTERS + 1)
        commands = (
            _commands_of_json(text, str(path))
            if str(path).endswith(".json")
            else shell_commands(text, arguments, environ, str(path))
        )
    except OSError as error:
        raise ResolutionError([_unreadable(str(path), error.strerror or str(error))]) from None
    except ShellLimit as limit:
        raise ResolutionError([_unreadable(str(path), str(limit))]) from None
    found = list(_trainings(commands, str(path)))
    if not found and _seems_to_train(text):
        raise ResolutionError([_no_command(str(path), "contains no command that can be read, although it has a program and")])
    return found


def _seems_to_train(text: str) -> bool:
    code = re.sub(r"(?m)^\s*#.*", "", text)
    return ".py" in code and any(option in code for option in _TRAINS)


def _unreadable(path: str, reason: str) -> Problem:
    return Problem(
        "MS305", f"{path} cannot be read: {reason}", where=path, fix=Fix.advise("give a readable script or JSON file")
    )


def _program(path: str) -> Problem:
    """The problem of a program where a script that starts one is read."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        is_recipe = re.search(r"\bConfigContainer\b|\bmegatron\.bridge\b", file.read(MAX_CHARACTERS)) is not None
    if is_recipe:
        text = "a recipe of Megatron-Bridge needs torch, transformers and its models to be imported"
        fix = "run its ConfigContainer.validate() where these packages are installed"
    else:
        text = "only the command that starts this program contains its arguments"
        fix = f"mindspeed check -- torchrun {path} ..., or check the shell script with that command"
    return Problem("MS305", f"{path} is not checked: {text}", where=path, fix=Fix.advise(fix))


def _job_file(path: str) -> Problem:
    text, fix = f"{path} is no script with a training command", Fix.advise(f"check a job file by: mindspeed check -f {path}")
    return Problem("MS305", text, where=path, fix=fix)


def training_commands(text: str, source: str) -> list[LaunchedCommand]:
    """Every training command of a shell script."""
    return list(_trainings(shell_commands(text), source))


def _only(commands: Iterator[LaunchedCommand], source: str) -> LaunchedCommand:
    found = list(commands)
    if not found:
        raise ResolutionError([_no_command(source, "contains no command that runs a Python script with")])
    first, *rest = found
    return replace(first, others=tuple(f"{command.source}:{command.line}" for command in rest))


def _no_command(source: str, text: str) -> Problem:
    fix = advice("mindspeed check -- pretrain_gpt.py --num-layers 2 ...")
    return Problem("MS301", f"{source} {text} Megatron-LM's training arguments", where=source, fix=fix)


def _trainings(commands: Sequence[ShellCommand], source: str, strict: bool = True) -> Iterator[LaunchedCommand]:
    for command in commands:
        words = list(command.words)
        program = next((at for at, word in enumerate(words) if word.text.endswith(".py")), None)
        if program is None or words[0].text.rpartition("/")[2] in _NO_LAUNCHERS:
            continue
        arguments = tuple(words[program + 1 :])
        options = {word.text.partition("=")[0] for word in arguments}
        if strict and options.isdisjoint(_TRAINS):
            continue
        size, name = _world_size([word.text for word in words[:program]]), words[program]
        launcher = words[0].text.rpartition("/")[2] if program else ""
        file, line = name.file or source, name.line
        yield LaunchedCommand(name.text, arguments, size, file, command.unset, (), command.environ, line, launcher, source)


_NO_LAUNCHERS: Final = frozenset({"echo", "cat", "cp", "mv", "sed", "grep", "rm", "chmod", "ls", "vim", "source", "."})


def _world_size(launcher: Sequence[str]) -> int | None:
    """The number of processes that a launcher starts; None where it does not say, or says no number."""
    options: dict[str, str] = {}
    for word, after in pairwise([*launcher, ""]):
        name, equals, value = word.partition("=")
        options[name] = value if equals else after
    if (total := _first(options, _PROCESSES)) is not None:
        return whole_number(total)
    per_node, nodes = _first(options, _PER_NODE), _first(options, _NODES) or "1"
    if per_node is None:
        is_single = bool(launcher) and launcher[0].rpartition("/")[2].startswith("python") and "-m" not in launcher
        return 1 if is_single else None
    counts = whole_number(per_node), whole_number(nodes)
    return counts[0] * counts[1] if counts[0] is not None and counts[1] is not None else None


def _first(options: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((options[name] for name in names if name in options), None)


def _commands_of_json(text: str, path: str) -> list[ShellCommand]:
    """The command of a JSON file: a list of words, or an object (as in ``launch.json``) with ``args`` and a ``program``."""
    try:
        data = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    except (ValueError, RecursionError) as error:
        fix = Fix.advise("correct the JSON at that position")
        raise ResolutionError([Problem("MS305", f"{path} is not valid JSON: {error}", where=path, fix=fix)]) from None
    found = data.get("configurations") if isinstance(data, dict) else None
    entries = found if isinstance(found, list) else [data]
    return [ShellCommand(tuple(Word(word, _line(text, word)) for word in _words_of(entry))) for entry in entries]


def _words_of(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [str(word) for word in entry] if isinstance(entry, list) else str(entry).split()
    arguments: Any = next((entry[name] for name in ("args", "arguments", "command") if name in entry), [])
    if isinstance(arguments, dict):
        arguments = [word for name, value in arguments.items() for word in _option(name, value)]
    elif not isinstance(arguments, list):
        arguments = str(arguments).split()
    program = entry.get("program") or entry.get("script")
    processes = entry.get("nproc_per_node") or entry.get("nproc")
    launcher = ["torchrun", "--nproc-per-node", str(processes)] if processes else ["python"] if program else []
    return [*launcher, *([str(program)] if program else []), *map(str, arguments)]


def _option(name: str, value: Any) -> list[str]:
    flag = name if name.startswith("-") else f"--{name.replace('_', '-')}"
    if value is False:
        return []
    return [flag] if value is True or value is None else [flag, *map(str, value if isinstance(value, list) else [value])]


def _line(text: str, word: str) -> int:
    """The line of a word in a JSON file, in either of the spellings of an option; 0 for no place."""
    names = (json.dumps(word), json.dumps(word.removeprefix("--")), json.dumps(word.removeprefix("--").replace("-", "_")))
    at = next((text.find(name) for name in names if name in text), -1)
    return text.count("\n", 0, at) + 1 if at >= 0 else 0
