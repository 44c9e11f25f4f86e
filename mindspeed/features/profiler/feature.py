"""Traces of chosen steps on chosen ranks, in which every patch and hook has the name of its feature."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    VerifyWith,
    World,
    hookimpl,
    why_unwritable,
)

if TYPE_CHECKING:
    from mindspeed.features.profiler.window import TraceWindow


class ProfilerArgs(FeatureArgs):
    start: int = Field(10, ge=0, description="completed steps of the run before the first traced one")
    end: int = Field(12, ge=1, description="the last traced step")
    level: Literal["level0", "level1", "level2"] = Field("level0", description="detail of kernels; npu only")
    cpu: bool = Field(False, description="trace the host as well; always on the cpu platform")
    stack: bool = Field(False, description="record where each operator was called")
    memory: bool = Field(False, description="record allocations; needs cpu")
    shapes: bool = Field(False, description="record the shapes of operands")
    folder: str = Field("./profile_dir", description="where the traces are written")
    ranks: tuple[int, ...] = Field((0,), min_length=1, description="ranks that are traced; -1 is all")


def _on_npu(args: ProfilerArgs, world: World) -> bool:
    return args.level == "level0" or world.platform == "npu"


def _has_host(args: ProfilerArgs, world: World) -> bool:
    return not (args.cpu and world.platform == "cpu")


class Profiler(Feature[ProfilerArgs]):
    """Trace a window of steps with the profiler of the platform, one file for each chosen rank."""

    spec = FeatureSpec(
        name="profiler",
        summary="Traces of chosen steps and ranks, with the name of each feature",
        category=Category.TOOL,
        level=0,
        steps=lambda args: (args.start + 1, args.end),
        constraints=(
            Check(
                lambda args, world: args.end > args.start,
                "the window ends with step {args.end}, and {args.start} steps come before it",
                fix="--set profiler.end=N with N above {args.start}",
            ),
            Check(
                lambda args, world: args.cpu or not args.memory,
                "allocations are recorded only together with the host",
                fix="--set profiler.cpu=true, or remove profiler.memory",
            ),
            Check(
                lambda args, world: all(-1 <= rank < world.world_size for rank in args.ranks),
                "ranks {args.ranks} are to be traced, and the job has {world.world_size}",
                fix="use ranks from 0 to the last one, or -1 for all",
            ),
            Check(
                lambda args, world: not why_unwritable(Path(args.folder)),
                "the folder {args.folder} cannot be written",
                fix="--set profiler.folder=FOLDER, where files can be written",
            ),
            Check(
                _on_npu,
                "profiler.level={args.level} means nothing on {world.platform}: only the profiler of an NPU has levels",
                fix="remove profiler.level",
                warns=True,
            ),
            Check(
                _has_host,
                "profiler.cpu means nothing on the cpu platform, whose traces always have the host",
                fix="remove profiler.cpu, unless profiler.memory needs it",
                when=lambda args, world: not args.memory,
                warns=True,
            ),
        ),
        megatron_flags=(
            MegatronFlag("profile_step_start", "start"),
            MegatronFlag("profile_step_end", "end"),
            MegatronFlag("profile_ranks", "ranks", convert=tuple),
        ),
        numerics=Numerics.exact(),
        verify_with=VerifyWith(settings={"profiler": {"start": 0, "end": 1, "folder": f"{gettempdir()}/mindspeed-profile"}}),
    )
    window: TraceWindow | None = None

    @hookimpl
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        if self.window is None:
            from mindspeed.features.profiler.window import TraceWindow, is_traced

            if not is_traced(self.args.ranks) or state.step >= self.args.end:
                return None
            self.window = TraceWindow(self.args, self.world.platform if self.world.knows("platform") else "cpu")
        return self.window.step(state.step + 1)

    @hookimpl
    def group_options(self, group: str) -> Any:
        if not self.world.knows("platform") or self.world.platform != "npu":
            return None
        from mindspeed.features.profiler.npu import named_group

        return named_group(group)

    @hookimpl
    def deactivated(self) -> None:
        if self.window is not None:
            self.window.close()
