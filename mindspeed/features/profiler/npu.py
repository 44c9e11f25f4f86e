"""The profiler of Ascend NPUs, and names of groups in its traces. Calls of torch_npu alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed.features.profiler.feature import ProfilerArgs


def make_profiler(args: ProfilerArgs, rank: int) -> Any:
    """Make torch_npu's profiler; it writes one trace below the folder when it stops."""
    import torch_npu

    profiler = torch_npu.profiler
    activities = [profiler.ProfilerActivity.NPU, *([profiler.ProfilerActivity.CPU] if args.cpu else [])]
    levels = profiler.ProfilerLevel
    level = {"level0": levels.Level0, "level1": levels.Level1, "level2": levels.Level2}[args.level]
    metrics = profiler.AiCMetrics.AiCoreNone if args.level == "level0" else profiler.AiCMetrics.PipeUtilization
    experimental = profiler._ExperimentalConfig(aic_metrics=metrics, profiler_level=level)
    return profiler.profile(
        activities=activities,
        on_trace_ready=profiler.tensorboard_trace_handler(args.folder, worker_name=f"rank{rank}"),
        record_shapes=args.shapes,
        profile_memory=args.memory,
        with_stack=args.stack,
        experimental_config=experimental,
    )


def named_group(group: str) -> Any:
    """Return options by which a process group of HCCL carries its name."""
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"group_name": group}
    return options
