"""The one line that a Megatron-LM script needs: ``import mindspeed.megatron_adaptor``.

Importing it reads the command line, resolves what it asks for and activates the plan in this process; see
docs/megatron-lm.md. Our flags are removed from ``sys.argv``, so that Megatron-LM's parser reads what is left. Under
``mindspeed run``, and in a process that an adapted one has spawned, the plan is active already and nothing happens again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableSequence
from dataclasses import replace
from pkgutil import resolve_name

from mindspeed.process.gc_pause import collector_paused

with collector_paused():
    from mindspeed import registry
    from mindspeed.engine.planning.fingerprint import numeric_variables
    from mindspeed.engine.planning.lock import LOCK_VARIABLE, read_lock, require_match
    from mindspeed.engine.runtime import rendezvous, session, uncaught
    from mindspeed.engine.runtime.launch import end_with_launcher
    from mindspeed.engine.runtime.session import ActivationReport
    from mindspeed.megatron_lm.given_arguments import argument_facts, compared_arguments
    from mindspeed.megatron_lm.raw_data import with_prepared_data
    from mindspeed.megatron_lm.training_plan import plan_training, report_beside
    from mindspeed.problems import MindSpeedError


def adapt(argv: MutableSequence[str]) -> ActivationReport | None:
    """Activate the plan of ``argv`` (as ``sys.argv``), and remove mindspeed's flags from it; None where a plan is active
    already.

    Raises MindSpeedError with every problem at once, and where ``MINDSPEED_LOCK`` names a lock of another job.
    """
    if session.current() is not None:
        return None
    end_with_launcher()
    environment = registry.probe()
    environment = replace(environment, world_size=environment.world_size or 1)
    try:
        request, plan = plan_training(argv[1:], os.environ, environment)
        if file := os.environ.get(LOCK_VARIABLE):
            arguments = argument_facts(argv[1:], environment.megatron)
            require_match(read_lock(file), registry.content_of(plan, numeric_variables(os.environ)) | arguments, file)
        argv[1:] = with_prepared_data(request.rest, request.given, request.raw, environment.megatron)
    except MindSpeedError as error:
        rendezvous.report_failure(error)
        raise
    if plan.names:
        report_beside(request, os.environ)
    report = registry.activate(plan, compared_arguments(argv[1:], environment.megatron))
    if os.environ.get("RANK", "0") == "0":
        print(report.summary(), *(f"mindspeed: {row.text}" for row in request.notes), sep="\n", file=sys.stderr)
    return report


__path__: list[str] = []  # the finder of old names is asked for the names that are not here
_OLD_NAMES = {
    "repatch": "mindspeed.compat.activation:repatch",
    "get_mindspeed_args": "mindspeed.compat.arguments:get_mindspeed_args",
}


def __getattr__(name: str) -> object:
    """MindSpeed's other names of this module."""
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(_OLD_NAMES[name])


uncaught.install()
adapt(sys.argv)
