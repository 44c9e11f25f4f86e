"""Traces of chosen steps on chosen ranks, in which every patch and hook has the name of its feature."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from mindspeed import plugins as ms
from mindspeed.files.cache_folder import why_unwritable

if TYPE_CHECKING:
    from mindspeed.features.profiler.window import TraceWindow


class ProfilerArgs(ms.FeatureArgs):
    start: int = ms.Field(
        10, ge=0, description="Number of steps before the first traced step; tracing begins with step start + 1"
    )
    end: int = ms.Field(12, ge=1, description="Last step that is traced, counted from 1 at the start of the run")
    level: Literal["level0", "level1", "level2"] = ms.Field(
        "level0", description="Detail of kernel traces (NPU only); level2 = most"
    )
    cpu: bool = ms.Field(False, description="Trace CPU operators too, not only device kernels; always on for the cpu platform")
    stack: bool = ms.Field(False, description="Record the call stack of each operator")
    memory: bool = ms.Field(False, description="Record memory allocations; needs cpu=true")
    shapes: bool = ms.Field(False, description="Record the shapes of the tensors that each operator gets")
    folder: str = ms.Field("./profile_dir", description="Folder for the trace files")
    ranks: tuple[int, ...] = ms.Field((0,), min_length=1, description="Ranks to trace; -1 = all")

    @model_validator(mode="after")
    def _window_has_a_step(self) -> ProfilerArgs:
        if self.end <= self.start:
            text = f"the last traced step is end={self.end}, but start={self.start} skips all steps up to it"
            raise ms.SettingsError(text, ms.Fix.give_setting("end", self.start + 2))
        return self

    @model_validator(mode="after")
    def _allocations_have_the_host(self) -> ProfilerArgs:
        if self.memory and not self.cpu:
            text = "memory=true records allocations only together with cpu=true"
            raise ms.SettingsError(text, ms.Fix.give_setting("cpu", True), ms.Fix.drop_setting("memory"))
        return self


@ms.condition(
    "ranks {args.ranks} are selected for tracing, but the job has only {world.world_size} ranks, counted from 0",
    fix=(ms.Fix.give_setting("ranks", note="ranks from 0 to the last one, or -1 for all"),),
)
def ranks_exist(args: ProfilerArgs, world: ms.World) -> bool:
    """Check that the job has every traced rank."""
    return all(-1 <= rank < world.world_size for rank in args.ranks)


@ms.condition("folder {args.folder} is not writable", fix=(ms.Fix.give_setting("folder", "FOLDER", note="a writable folder"),))
def folder_is_writable(args: ProfilerArgs, world: ms.World) -> bool:
    """Check that traces can be written."""
    return not why_unwritable(Path(args.folder))


@ms.condition(
    "profiler.level={args.level} has no effect on {world.platform}: only the NPU profiler has levels",
    fix=(ms.Fix.drop_setting("level"),),
    otherwise="warn",
)
def level_has_effect(args: ProfilerArgs, world: ms.World) -> bool:
    """Check that the platform has levels of detail, where one is given."""
    return args.level == "level0" or bool(world.platform == "npu")


def _records_no_memory(args: ProfilerArgs, world: ms.World) -> bool:
    """Return whether memory is not recorded."""
    return not args.memory


@ms.condition(
    "profiler.cpu has no effect on the cpu platform, whose traces always include CPU activity",
    fix=(ms.Fix.drop_setting("cpu"),),
    when=_records_no_memory,
    otherwise="warn",
)
def cpu_has_effect(args: ProfilerArgs, world: ms.World) -> bool:
    """Check that traces do not include the host anyway."""
    return not (args.cpu and world.platform == "cpu")


class Profiler(ms.Feature[ProfilerArgs]):
    """Trace chosen steps and ranks with feature names.

    Runs the profiler of the platform, torch.profiler or torch_npu.profiler. Each chosen rank writes one trace file, in
    which operators are attributed to features.
    """

    spec = ms.FeatureSpec(
        name="profiler",
        category=ms.Category.TOOL,
        level=0,
        constraints=(ranks_exist, folder_is_writable, level_has_effect, cpu_has_effect),
        megatron_flags=(
            ms.MegatronFlag("profile_step_start", "start"),
            ms.MegatronFlag("profile_step_end", "end"),
            ms.MegatronFlag("profile_ranks", "ranks", convert=tuple),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(settings={"profiler": {"start": 0, "end": 1, "folder": f"{gettempdir()}/mindspeed-profile"}}),
    )
    window: TraceWindow | None = None

    @ms.hookimpl
    def working_steps(self) -> tuple[int, int]:
        return self.args.start + 1, self.args.end

    @ms.hookimpl(tryfirst=True)  # what other features do around a step is in the trace as well
    def around_train_step(self, state: Any) -> AbstractContextManager[None] | None:
        if self.window is None:
            from mindspeed.features.profiler.window import TraceWindow, is_traced

            if not is_traced(self.args.ranks) or state.step >= self.args.end:
                return None
            self.window = TraceWindow(self.args, self.world.platform if self.world.knows("platform") else "cpu")
        return self.window.step(state.step + 1)

    @ms.hookimpl
    def group_options(self, group: str) -> Any:
        if not self.world.knows("platform") or self.world.platform != "npu":
            return None
        from mindspeed.features.profiler.npu import named_group

        return named_group(group)

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.window is not None:
            self.window.close()
