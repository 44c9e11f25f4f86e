"""Hangs of a job that name the rank, its section and its last collective."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import plugins as ms

if TYPE_CHECKING:
    from mindspeed.features.resiliency.heartbeat import Heartbeat
    from mindspeed.features.resiliency.watch import Watch


class ResiliencyArgs(ms.FeatureArgs):
    level: Literal["off", "report", "restart"] = ms.Field(
        "report",
        description="Action when a rank hangs: off = none, report = name it in the logs, restart = also end all ranks with "
        "exit status 75",
    )
    timeout: float = ms.Field(
        300.0, ge=1, description="Seconds without progress in a step, an evaluation or a collective after which a rank hangs"
    )
    save_timeout: float = ms.Field(1800.0, ge=1, description="Seconds without progress in a save after which a rank hangs")
    rank_monitor: bool = ms.Field(
        False, description="Also report sections to the rank monitor of ft_launcher (nvidia-resiliency-ext)"
    )


@ms.condition(
    "resiliency.rank_monitor needs the package nvidia-resiliency-ext, which is not installed on this machine",
    fix=(ms.Fix.run_command("pip install nvidia-resiliency-ext"), ms.Fix.drop_setting("rank_monitor")),
)
def rank_monitor_is_installed(args: ResiliencyArgs, world: ms.World) -> bool:
    """Check that nvidia-resiliency-ext is installed where its rank monitor is used."""
    return not args.rank_monitor or find_spec("nvidia_resiliency_ext") is not None


class Resiliency(ms.Feature[ResiliencyArgs]):
    """Name the rank and the collective of a hang.

    Each rank keeps a heartbeat in the store of the process group, and a thread watches it. If it stops, the log of each node
    names the ranks that lag. The job then waits on, or ends for a restart. The slowest rank of each step is logged.
    """

    spec = ms.FeatureSpec(
        name="resiliency",
        category=ms.Category.TOOL,
        level=0,
        constraints=(rank_monitor_is_installed,),
        numerics=ms.Numerics.exact(),
    )
    heartbeat: Heartbeat | None = None
    watch: Watch | None = None

    @ms.hookimpl
    def activated(self) -> None:
        if self.args.level != "off":
            from mindspeed.features.resiliency.heartbeat import Heartbeat

            self.heartbeat = Heartbeat()
            if self.args.rank_monitor:
                from mindspeed.features.resiliency.rank_monitor import RankMonitor

                self.heartbeat.monitor = RankMonitor()

    @ms.hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        if self.heartbeat is None:
            return None
        if self.watch is None:
            from mindspeed.features.resiliency.watch import Watch, has_peers

            if not has_peers():
                return None
            self.watch = Watch(self.heartbeat, self.args)
        self.heartbeat.step = state.step + 1
        return self.heartbeat.section("step")

    @ms.hookimpl
    def around_schedule(self, chunks: Any, forward_only: bool, micro_batches: int) -> AbstractContextManager[None] | None:
        return self._section("evaluation") if forward_only else None

    @ms.hookimpl
    def around_data_load(self) -> AbstractContextManager[None] | None:
        return self._section("data")

    @ms.hookimpl
    def around_forward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return self._section("forward")

    @ms.hookimpl
    def around_backward_step(self, unit: Any) -> AbstractContextManager[None] | None:
        return self._section("backward")

    @ms.hookimpl
    def around_save(self, step: int) -> AbstractContextManager[None] | None:
        return self._section("save")

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float] | None:
        return None if self.heartbeat is None else self.heartbeat.slowest_rank()

    @ms.hookimpl
    def run_failed(self, error: BaseException) -> None:
        self._stop()

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        self._stop()

    @ms.hookimpl
    def deactivated(self) -> None:
        self._stop()

    def _section(self, name: str) -> AbstractContextManager[None] | None:
        return None if self.heartbeat is None else self.heartbeat.section(name)

    def _stop(self) -> None:
        if self.watch is not None:
            self.watch.stop()
            self.watch = None
