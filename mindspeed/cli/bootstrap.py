"""Run one process of ``mindspeed run``: ``python -m mindspeed.cli.bootstrap PROGRAM ARGUMENT...``.

Activates the plan that the environment names, then becomes the program, a script or ``-m MODULE``: its own ``__main__``,
``sys.argv``, import path, traceback and exit status.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, NoReturn

from mindspeed.problems import MindSpeedError

MODULE: Final = "-m"
"""First word of a program that is a module, as for Python itself."""


def main() -> NoReturn:
    from mindspeed.cli.output import exit_code
    from mindspeed.engine.runtime.launch import end_with_launcher, leave_problems

    end_with_launcher()
    try:
        run_program(sys.argv[1:])
    except MindSpeedError as error:
        leave_problems(error)  # the launcher prints them, once for all ranks
        sys.exit(exit_code(error.problems))


def run_program(words: Sequence[str]) -> NoReturn:
    """Activate the plan of this process's environment and end as the program ends.

    ``words`` are a script or ``-m MODULE``, then its arguments.
    Raises MindSpeedError when the plan cannot be activated, or when the program meets a problem that mindspeed knows.
    """
    from mindspeed.registry import activate_from_environment

    set_import_path(words)
    report = activate_from_environment(_facts(words))
    first = os.environ.get("RANK", "0") == "0"
    if first and report is not None and report.features:
        print(report.summary(), file=sys.stderr)
    _become(words)
    if first:
        report_unused_arguments()
    sys.exit(0)


def _facts(words: Sequence[str]) -> dict[str, str]:
    """Return what all ranks must have equal of the arguments of a Megatron-LM script; nothing for another program."""
    from mindspeed.engine.inspection.megatron_copies import megatron_version
    from mindspeed.megatron_lm.given_arguments import compared_arguments
    from mindspeed.megatron_lm.training_plan import is_training_script

    script, *arguments = words
    if script == MODULE or not is_training_script(script):
        return {}
    return compared_arguments(arguments, megatron_version())


def set_import_path(words: Sequence[str]) -> None:
    """Let imports look first where Python looks for this program: the script's folder, or the working directory."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if words[0] == MODULE else os.path.dirname(os.path.abspath(words[0]))


def report_unused_arguments() -> None:
    """Print the arguments of the plan that no configuration and no call of the program has used."""
    from mindspeed.megatron.argument_overrides import unused_overrides

    for planned in unused_overrides():
        owners = ", ".join(planned.owners)
        print(f"mindspeed: the script did not use the argument {planned.override.argument} ({owners})", file=sys.stderr)


def _become(words: Sequence[str]) -> None:
    """Run a program as ``__main__``; the module stays, as threads, atexit handlers and pickle may still want it."""
    set_import_path(words)
    code, module = _module_program(words[1]) if words[0] == MODULE else _script_program(words[0])
    arguments = words[2:] if words[0] == MODULE else words[1:]
    sys.modules["__main__"] = module
    sys.argv[:] = [words[0] if module.__spec__ is None else str(module.__file__), *arguments]
    try:
        exec(code, module.__dict__)
    except MindSpeedError as error:
        from mindspeed.engine.runtime import rendezvous

        rendezvous.report_failure(error)
        raise
    except SystemExit as end:
        if end.code:
            _abandon_proof()
        raise
    except (Exception, KeyboardInterrupt) as error:
        _abandon_proof()
        frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(frame), frame)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _abandon_proof() -> None:
    from mindspeed.engine.runtime import session

    if (active := session.current()) is not None:
        active.proof.abandon()


def _script_program(script: str) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__file__ = path
    try:
        return compile(Path(path).read_bytes(), path, "exec"), module
    except SyntaxError as error:
        sys.excepthook(type(error), error, None)
        sys.exit(1)


def _module_program(name: str) -> tuple[CodeType, ModuleType]:
    """The code of a module, or of a package's ``__main__``, and the module that runs it; ends as Python does without one."""
    error: type[ImportError] = runpy._Error  # type: ignore[attr-defined]
    try:
        _, spec, code = runpy._get_module_details(name, error)  # type: ignore[attr-defined]  # as python -m does
    except error:
        sys.exit(f"{sys.executable}: no module {name} that can be run")
    module = ModuleType("__main__")
    module.__file__, module.__spec__, module.__package__, module.__loader__ = spec.origin, spec, spec.parent, spec.loader
    return code, module


if __name__ == "__main__":
    main()
