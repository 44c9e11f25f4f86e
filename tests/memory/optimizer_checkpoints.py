"""Runs of Adam that save and resume by Megatron's distributed checkpoints, as jobs of the pool."""

from pathlib import Path
from typing import Any

from mindspeed.workbench.verification.shape import Recipe
from tests.memory.adam_steps import adam_run, record


def save_and_go_on(recipe: Recipe, at: int, folder: str, sharding: str, asynchronous: bool) -> dict[str, Any]:
    """Train, save after ``at`` steps, and finish the training, while an asynchronous checkpoint may still be written."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    with adam_run(recipe) as run:
        for step in range(at):
            run.train_step(step)
        if run.ddp_config.overlap_param_gather:
            for chunk in run.chunks:
                chunk.start_param_sync(force_sync=True)
        Path(folder).mkdir(parents=True, exist_ok=True)
        request = dist_checkpointing.save(_content(run, sharding), folder, async_sharded_save=asynchronous)
        queue = AsyncCallsQueue()
        if asynchronous:
            queue.schedule_async_request(request)
        for step in range(at, recipe.steps):
            run.train_step(step)
        if asynchronous:
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()
        return vars(record(run))


def resume(recipe: Recipe, at: int, folder: str, sharding: str) -> dict[str, Any]:
    """Load a checkpoint of ``at`` steps into a model of other weights, and finish the training."""
    import torch
    from megatron.core import dist_checkpointing

    with adam_run(recipe) as run:
        with torch.no_grad():
            for chunk in run.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(3.0)
        loaded = dist_checkpointing.load(_content(run, sharding, is_loading=True), folder)
        for index, chunk in enumerate(run.chunks):
            chunk.module.module.load_state_dict(loaded[f"model{index}"])
        run.optimizer.load_state_dict(loaded["optimizer"])
        for step in range(at, recipe.steps):
            run.train_step(step)
        return vars(record(run))


def _content(run: Any, sharding: str, is_loading: bool = False) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    chunks = enumerate(unwrap_model(run.chunks))
    content = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in chunks}
    content["optimizer"] = run.optimizer.sharded_state_dict(dict(content), is_loading=is_loading, metadata=metadata)
    return content
