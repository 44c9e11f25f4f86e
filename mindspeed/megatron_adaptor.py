"""The one line that a Megatron-LM script needs: ``import mindspeed.megatron_adaptor``.

Importing it reads the command line, resolves what it asks for and activates the plan in this process; see
docs/megatron-lm.md. Our flags are taken out of ``sys.argv``, so that Megatron-LM's parser reads what is left. Under
``mindspeed run``, and in a process that an adapted one has spawned, the plan is active already and nothing happens again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableSequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

from mindspeed import registry
from mindspeed.activation import session
from mindspeed.activation.environment import probe
from mindspeed.activation.proof import REPORT_VARIABLE
from mindspeed.activation.session import ActivationReport
from mindspeed.megatron.training_plan import plan_training
from mindspeed.megatron.training_request import ScriptRequest
from mindspeed.plugins.problems import MindSpeedError

REPORT_NAME: Final = "mindspeed-report.json"


def adapt(argv: MutableSequence[str]) -> ActivationReport | None:
    """Activate what ``argv`` (as ``sys.argv``) asks for, and take our flags out of it; None where a plan is active already.

    Raises MindSpeedError with every problem at once.
    """
    if session.current() is not None:
        return None
    environment = probe()
    environment = replace(environment, world_size=environment.world_size or 1)
    request, plan = plan_training(argv[1:], os.environ, environment)
    argv[1:] = request.rest
    os.environ.setdefault(REPORT_VARIABLE, str(report_path(request)))
    report = registry.activate(plan)
    if os.environ.get("RANK", "0") == "0":
        print(report.summary(), *(f"mindspeed: {row.text}" for row in request.notes), sep="\n", file=sys.stderr)
    return report


def report_path(request: ScriptRequest) -> Path:
    """Where the report of a run lies: in the folder of its checkpoints, else of its TensorBoard files, else here."""
    folders = (request.given[dest].value for dest in ("save", "tensorboard_dir") if dest in request.given)
    return Path(next(folders, ".")) / REPORT_NAME


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """``sys.excepthook`` of an adapted script: problems are shown as problems, everything else as before."""
    if not isinstance(error, MindSpeedError):
        _before(kind, error, trace)
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    name = f"rank {os.environ.get('RANK', '0')}: " if ranks > 1 else ""
    print("\n".join(f"{name}{problem}" for problem in error.problems), file=sys.stderr)


_before = sys.excepthook
sys.excepthook = _show
adapt(sys.argv)
