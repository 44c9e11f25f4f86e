"""``mindspeed check --start``: the distinct ranks of every job without problems, started on no device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.cli.request_options import Request
from mindspeed.engine.resolution.planned_feature import PlanNote
from mindspeed.problems import Fix, Problem, ResolutionError, RunError

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.workbench.lint.launched_command import LaunchedCommand
    from mindspeed.workbench.lint.upstream.process import Checkout
    from mindspeed.workbench.verification.pool import WorkerPool


class Starts:
    """Starts of the jobs of a request; a Megatron-LM has one pool of workers for all its commands."""

    def __init__(self, request: Request) -> None:
        self._request = replace(request, layers=tuple(replace(layer, platform="cpu") for layer in request.layers))
        self._pools: dict[str, WorkerPool] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Starts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def of(self, plan: ActivationPlan, command: LaunchedCommand | None, checkout: Checkout | None) -> ActivationPlan:
        """Start the job of a plan: a Megatron-LM command, or without one the requested job of ``mindspeed pretrain``.

        Returns the plan, with a row where the job cannot be started on the CPU. Raises MindSpeedError with what a rank refuses.
        """
        try:
            if command is None:
                self._job(plan)
            else:
                self._command(command, plan, checkout)
        except ResolutionError as error:
            text = f"its ranks are not started on a CPU: {error.problems[0].message}"
            return replace(plan, rows=(*plan.rows, PlanNote("not-checked", "start", text)))
        return plan

    def _job(self, plan: ActivationPlan) -> None:
        from mindspeed.workbench.start import trainer_start
        from mindspeed.workbench.training.config import JOB_FILE
        from mindspeed.workbench.training.job import make_job

        if not plan.world.knows("world_size"):
            fix = Fix.give_field("world_size")
            raise RunError([Problem("MS307", "ranks cannot be started without world_size", fix=fix)])
        environment = self._request.environment(int(plan.world.world_size))
        job = make_job(self._request.layers, {JOB_FILE: self._request.train}, environment)
        trainer_start.start(self._pool(""), job)

    def _command(self, command: LaunchedCommand, plan: ActivationPlan, checkout: Checkout | None) -> None:
        from mindspeed.megatron_lm.script_options import script_options
        from mindspeed.workbench.start import script_start

        if checkout is None:
            text = "the command cannot be started, because its Megatron-LM is not here"
            raise RunError([Problem("MS502", text, fix=Fix.give_option("--checkout", "FOLDER"))])
        *below, command_line = self._request.layers
        environment = self._request.environment(int(plan.world.world_size))
        if checkout.version is not None:
            environment = replace(environment, megatron=checkout.version)
        options = script_options(command.program, Path(command.source), checkout.folder)
        pool = self._pool(str(checkout.folder))
        script_start.start(pool, command, checkout.folder, environment, below, [command_line], options)

    def _pool(self, folder: str) -> WorkerPool:
        from mindspeed.workbench.verification.pool import WorkerPool

        if folder not in self._pools:
            self._pools[folder] = self._stack.enter_context(WorkerPool([folder] if folder else []))
        return self._pools[folder]
