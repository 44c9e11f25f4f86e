"""The child process: ``{checkout, facts, seconds}`` is its argument; it reads commands and writes a line of JSON for each.

It imports the rules before it reads. A line has the ``failed``, ``undecided`` and ``held`` sites by their numbers;
``sites`` are those that no earlier line had, and ``errors`` is what ended the check of the command. ``refused`` are values of
the plan that the parsed arguments contradict, ``job`` fields of the job that the validated ones give, with what decides each,
and ``unjudged`` is what the check of the command lacks here.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import dataclasses
import inspect
import io
import json
import os
import signal
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NoReturn, TextIO

from mindspeed.job.megatron_arguments import put_launch_order, put_values, world_of
from mindspeed.workbench.lint.upstream.importing import Imports
from mindspeed.workbench.lint.upstream.rewriting import Rules, place
from mindspeed.workbench.lint.upstream.stand_ins import ImportStandIn
from mindspeed.workbench.lint.upstream.start import start

_REFUSED: Final = (
    *("socket.", "subprocess.", "shutil.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir"),
)


class ParserError(Exception):
    """Megatron's parser refuses the command line."""


class _WrapperError(Exception):
    """A feature's wrapper of Megatron's validation cannot be imported without torch."""


class TimeLimit(BaseException):
    """A command takes more processor time than a check may."""


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse network, processes and writing, which no argument module needs."""
    writes = event == "open" and isinstance(arguments[1], str) and any(sign in arguments[1] for sign in "wax+")
    if writes or event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed in a check")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ParserError(message)


def _limit() -> None:
    """Bound the memory of this process where the system can, and end a command that takes too long."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    signal.signal(signal.SIGPROF, _stop)


def _stop(number: int, frame: object) -> NoReturn:
    raise TimeLimit


def _start_timer(seconds: float) -> None:
    """Raise TimeLimit after this much processor time; 0 takes the timer back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def prepared() -> tuple[dict[str, Any], TextIO, Rules, Imports]:
    """Make this process one that imports Megatron's rules. Return its task, the output, the rules and their imports."""
    task = json.loads(sys.argv[-1])
    answer, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
    _limit()
    ImportStandIn.facts = task["facts"]
    if not hasattr(typing, "override"):
        vars(typing)["override"] = lambda function: (
            function
        )  # Python 3.12 has it, and a module with it alone is read by an older one
    rules = Rules()
    vars(builtins).update(rules.names() | {"exit": sys.exit, "quit": sys.exit})
    imports = Imports(Path(task["checkout"]), rules.compiled)
    sys.meta_path.insert(0, imports)
    setattr(argparse.ArgumentParser, "error", _refuse)  # noqa: B010
    for module, function in ((inspect, "getsource"), (ast, "parse")):  # Megatron's parser calls them anew for each command
        setattr(module, function, lru_cache(maxsize=None)(getattr(module, function)))
    sys.addaudithook(_guard)
    return task, answer, rules, imports


def main() -> None:
    task, answer, rules, imports = prepared()
    known, broken = 0, _imported(imports, task["seconds"])
    for command in json.loads(sys.stdin.read() or "[]"):
        made: dict[str, Any] = {"refused": {}, "job": {}, "unjudged": ""}
        errors = broken or _run(command, rules, imports, task["seconds"], made)
        errors += [failed for failed in imports.failures() if failed not in errors]
        new, known = rules.sites[known:], len(rules.sites)
        json.dump({"errors": errors, **made, **rules.states(), "sites": list(map(dataclasses.asdict, new))}, answer)
        answer.write("\n")
        answer.flush()


def _imported(imports: Imports, seconds: float) -> list[str]:
    """Import the parser and the validation, and parse once, which reads sources. Return what ended that."""
    name = "megatron.training.arguments"
    ImportStandIn.absent = True
    _start_timer(seconds)
    try:
        module = import_module(name)
        with suppress(Exception, SystemExit):
            sys.argv = ["pretrain_gpt.py"]
            module.parse_args(ignore_unknown_args=True)
    except TimeLimit:
        return [f"{name}: no result within {seconds:.0f} s"]
    finally:
        _start_timer(0)
    return imports.failures() if name in imports.failed else []


def _run(command: dict[str, Any], rules: Rules, imports: Imports, seconds: float, made: dict[str, Any]) -> list[str]:
    """Run every rule on one command: the parser, the validation, the configurations. Return what ended the run.

    What the plan puts into the arguments, and the job that they give, is added to ``made``.
    """
    os.environ.clear()
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(command["world_size"]), **command["environ"]})
    sys.argv = ["pretrain_gpt.py", *command["words"]]
    rules.forget()
    imports.overrides = command["of_configurations"]
    _start_timer(seconds)
    try:
        ImportStandIn.absent = True
        module = import_module("megatron.training.arguments")
        arguments = module.parse_args(ignore_unknown_args=True)
        ImportStandIn.absent = False
        put = put_values(command["overrides"], vars(arguments), command["defaults"])
        made["refused"] = {argument: dataclasses.asdict(one) for argument, one in put.items() if one.refused}
        vars(arguments).update({dest: ImportStandIn(dest, known=False) for dest in command["unknown"]})
        put_launch_order(command["platform"], vars(arguments), os.environ)
        if getattr(arguments, "yaml_cfg", None):
            module, validation = import_module("megatron.training.yaml_arguments"), "validate_yaml"
        else:
            validation = "validate_args"
        with _wrapped(command["wraps"]):
            validated = getattr(module, validation)(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
            made["job"] = _job_of(vars(arguments if validated is None else validated), rules.unknown)
            module.core_transformer_config_from_args(arguments)
            _other_configurations(arguments)
            start(imports.checkout, arguments if validated is None else validated, rules)
    except ParserError as error:
        return [f"parser: {error}"]
    except (FileNotFoundError, _WrapperError) as error:
        made["unjudged"] = str(error)
    except TimeLimit:
        return [f"no result within {seconds:.0f} s"]
    except (Exception, SystemExit) as error:
        file, line = place(error)
        return [f"{type(error).__name__}: {error} ({os.path.relpath(file, imports.checkout)}:{line})"]
    finally:
        _start_timer(0)
    return []


@contextmanager
def _wrapped(wraps: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Wrap functions of Megatron, ``(target, wrapper)``, as a plan does."""
    undone: list[tuple[Any, str, Any]] = []
    try:
        for target, wrapper in wraps:
            module, _, function = target.partition(":")
            owner, _, name = function.rpartition(".")
            holder = resolve_name(f"{module}:{owner}") if owner else import_module(module)
            original = getattr(holder, name)
            try:
                wrapped = resolve_name(wrapper)(original)
            except Exception as error:
                raise _WrapperError(f"{wrapper} cannot be called without torch ({type(error).__name__}: {error})") from error
            undone.append((holder, name, original))
            setattr(holder, name, wrapped)
        yield
    finally:
        for holder, name, original in reversed(undone):
            setattr(holder, name, original)


def _job_of(values: Mapping[str, Any], unknown: Collection[str]) -> dict[str, tuple[Any, Sequence[str]]]:
    """Return the fields of a job that follow from these arguments, without those of an ``unknown`` one."""
    known = {dest: value for dest, value in values.items() if dest not in unknown and _is_plain(value)}
    lacking = values.keys() - known.keys()
    return {field: found for field, found in world_of(known).items() if lacking.isdisjoint(found[1])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _other_configurations(arguments: Any) -> None:
    """Make the configurations that the training loop makes of arguments of the same names."""
    for module, name in (
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
        ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ):
        made = getattr(import_module(module), name)
        if dataclasses.is_dataclass(made):
            known = [one.name for one in dataclasses.fields(made) if one.init and hasattr(arguments, one.name)]
            made(**{one: getattr(arguments, one) for one in known})  # type: ignore[operator]


if __name__ == "__main__":
    main()
