"""One process of ``mindspeed run``: ``python -m mindspeed.cli.bootstrap SCRIPT ARGUMENT...``.

Activates the plan that the environment names, then becomes the script: its own ``__main__``, ``sys.argv``,
import path, traceback and exit status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from mindspeed.plugins.problems import MindSpeedError


def main() -> NoReturn:
    from mindspeed.cli.output import exit_code
    from mindspeed.training.launch import leave_problems

    script, *arguments = sys.argv[1:]
    try:
        run_script(script, arguments)
    except MindSpeedError as error:
        leave_problems(error)  # the launcher prints them, once for all ranks
        sys.exit(exit_code(error.problems))


def run_script(script: str, arguments: Sequence[str]) -> NoReturn:
    """Activate the plan of this process's environment and end as ``script`` ends.

    Raises MindSpeedError when the plan cannot be activated, or when the script meets a problem that mindspeed knows.
    """
    from mindspeed.registry import activate_from_environment

    look_beside(script)
    activate_from_environment()
    _become(script, arguments)
    if os.environ.get("RANK", "0") == "0":
        report_untaken()
    sys.exit(0)


def look_beside(script: str) -> None:
    """Let imports look first in the script's folder, as they do when Python runs it; a Megatron beside it is the one meant."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(script))


def report_untaken() -> None:
    """Say on stderr which arguments of the plan no configuration and no call of the script has taken."""
    from mindspeed.megatron.argument_overrides import unused_overrides

    for planned in unused_overrides():
        owners = ", ".join(planned.owners)
        print(f"mindspeed: nothing in the script took {planned.override.argument} ({owners})", file=sys.stderr)


def _become(script: str, arguments: Sequence[str]) -> None:
    """Run a file as ``__main__``; the module stays, as threads, atexit handlers and pickle may still want it."""
    path = os.path.abspath(script)
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = [script, *arguments]
    look_beside(script)
    with open(path, "rb") as file:
        source = file.read()
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except MindSpeedError as error:
        from mindspeed.runtime import rendezvous

        rendezvous.report_failure(error)
        raise
    except (Exception, KeyboardInterrupt) as error:
        frame = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(frame), frame)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main()
